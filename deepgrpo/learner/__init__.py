"""The compiled update: rows in, optimizer steps and metrics out."""

_LOSSES = "deepgrpo.learner.token_losses"
TEACHER_LOSSES = {  # objective.teacher_loss: module and function; imported only when used: no JAX here
    "null": f"{_LOSSES}:null_token",
    "sft": f"{_LOSSES}:sft_token",
    "luffy": f"{_LOSSES}:luffy_token",
    "snis": f"{_LOSSES}:snis_token",
}
