"""Worker extension: `deepgrpo_load`, which replaces the model's weights by a snapshot's, or refuses without touching the model.

vLLM's own reload answers success when tensors are missing (those layers keep their old values), leaves the model unusable when a
file is, and on a CPU leaves a tied head at its old values, since that is a packed copy which no tensor of the snapshot refreshes.
"""

import os
import re
import time

import deepgrpo_snapshot
import torch
from deepgrpo_snapshot import SnapshotError
from safetensors import safe_open


class WeightLoader:
    """Mixed into vLLM's worker class; its methods are called through /collective_rpc, on every worker at once."""

    def deepgrpo_load(self, path: str) -> dict:
        """Loads the snapshot at `path`: all workers do, or none of them touches its model.

        Returns:
          ok: the model has the new weights. error: what was wrong, else "".
          touched: after a failure, whether the model was changed; then it must not generate until a complete load has succeeded.
          missing, unexpected, mismatched: names of tensors, the last with found and expected shapes.
          seconds: of the parts check, load and head. The caller resets the prefix cache, which survives this.
        """
        report = {"ok": False, "error": "", "touched": False, "missing": [], "unexpected": [], "mismatched": [], "seconds": {}}
        clock = _Clock(report["seconds"])
        tensors = {}
        try:
            tensors = self._deepgrpo_checked(path, report)
        except Exception as error:  # whatever it is, the other workers wait for this one's vote
            report["error"] = str(error) if isinstance(error, SnapshotError) else f"{path}: {type(error).__name__}: {error}"
        if not _all_agree(not report["error"]):
            report["error"] = report["error"] or "another worker refused this snapshot"
            return report
        clock.lap("check")
        report["touched"] = True
        try:
            self.reload_weights(weights_iterator=iter(tensors.items()))
            clock.lap("load")
            if is_tied(self.model_config):
                repack_heads(self.model_runner.get_model())
            clock.lap("head")
        except Exception as error:  # the caller must learn what is left of the model; the engine would only answer 500
            report["error"] = f"{path}: loading broke off, the model is unusable: {type(error).__name__}: {error}"
            return report
        return report | {"ok": True}

    def _deepgrpo_checked(self, path: str, report: dict) -> dict[str, torch.Tensor]:
        """The snapshot's tensors, mapped into memory, module by module, when they are exactly those of this model and finite."""
        folder = deepgrpo_snapshot.locate(path, os.environ["DEEPGRPO_WEIGHTS_ROOT"])
        found = deepgrpo_snapshot.read(folder)
        if not hasattr(self, "_deepgrpo_shapes"):
            self._deepgrpo_shapes = exported_shapes(self.model_config.hf_config)
        expected = self._deepgrpo_shapes
        report["missing"] = sorted(expected.keys() - found.keys())
        report["unexpected"] = sorted(found.keys() - expected.keys())
        report["mismatched"] = [
            f"{name}: found {list(found[name].shape)}, expected {list(expected[name])}"
            for name in sorted(expected.keys() & found.keys())
            if found[name].shape != expected[name]
        ]
        counts = [f"{len(report[kind])} {kind}" for kind in ("missing", "unexpected", "mismatched") if report[kind]]
        if counts:
            names = [name for kind in ("missing", "unexpected", "mismatched") for name in report[kind]]
            raise SnapshotError(f"{path}: not this model's tensors: {', '.join(counts)}; for instance {'; '.join(names[:5])}")
        tensors = {}
        opened = {file: safe_open(file, framework="pt") for file in {entry.file for entry in found.values()}}
        for name in sorted(found, key=_natural):  # in the order of modules vLLM needs no buffers for half-filled ones
            tensors[name] = opened[found[name].file].get_tensor(name)
            if not is_finite(tensors[name]):
                raise SnapshotError(f"{path}: {name} holds values that are not finite")
        if is_tied(self.model_config):
            check_head(tensors, path)
        return tensors


def exported_shapes(config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face checkpoint of this model, a tied `lm_head.weight` included."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def is_tied(model_config) -> bool:
    """By config.json: vLLM says untied, too, when the folder that it started from repeats the embedding as a head."""
    return model_config.hf_config.tie_word_embeddings or model_config.word_embeddings_untied_by_checkpoint


def check_head(tensors: dict[str, torch.Tensor], path: str) -> None:
    """A tied model has no place for a head of the snapshot's own."""
    if not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise SnapshotError(f"{path}: lm_head.weight is not model.embed_tokens.weight, though config.json ties them")


def is_finite(tensor: torch.Tensor) -> bool:
    """In one pass without a temporary, but where the sum itself is too large for float32."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def repack_heads(model: torch.nn.Module) -> None:
    """Has a head that shares the embedding packed again from it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    if heads and len(embeddings) != 1:
        raise RuntimeError(f"tied head: found {len(embeddings)} embeddings, expected 1")
    for head in heads:
        head.weight = embeddings[0].weight
        head.quant_method.process_weights_after_loading(head)


def _all_agree(mine: bool) -> bool:
    """Whether every worker of this model says yes."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    if world.world_size == 1:
        return mine
    votes = torch.tensor([int(mine)])
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return bool(votes.item())


def _natural(name: str) -> list:
    """Sorts layer 10 after layer 9, and a module's tensors next to each other."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.]", name)]


class _Clock:
    def __init__(self, seconds: dict):
        self.seconds, self.last = seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
