"""Every configuration key, its default and its meaning. Experiments edit this; nothing else holds a default.

A key whose value is a placeholder must be set by the experiment or on the command line.
"""

import ml_collections
from ml_collections import config_dict

section = ml_collections.ConfigDict

# What becomes of the teacher's tokens: the four arms of the released scripts, which differ in nothing else.
TEACHER_ARMS = {
    "null": {},  # they only make the states
    "luffy": {"objective.teacher_loss": "luffy"},  # a row beside each injected group that did worse: shaped, by its advantage
    "snis": {"objective.teacher_loss": "snis"},  # likewise: log-likelihood, by a self-normalised importance weight
    "sft": {  # log-likelihood in optimizer steps of their own, at the end of each epoch
        "curriculum.teacher_rows": False,
        "curriculum.suffix_sft": "epoch_local",
        "objective.teacher_loss": "sft",
        "objective.teacher_update": "post_ppo",
        "objective.teacher_reduction": "separate_stream_mean",
    },
}


def edit(config: ml_collections.ConfigDict, arms: dict[str, dict], arm: str) -> None:
    """Applies the edits (by dotted key) of one of an experiment's arms.

    Raises:
      ValueError: there is no such arm; names those that there are.
    """
    if arm not in arms:
        raise ValueError(f"no arm {arm!r}; expected {', '.join(arms)}")
    config.update_from_flattened_dict(arms[arm])


def get_config() -> ml_collections.ConfigDict:
    config = section()
    config.name = config_dict.placeholder(str)  # of the run; its folder is <run_dir>/<name>
    config.run_dir = "runs"  # folder of run folders
    config.compilation_cache = ".cache/xla"  # folder of compiled programs, shared by runs; "": none
    config.seed = 0  # all randomness is fold_in(seed, step, purpose, index)
    config.requires_accelerator = False  # True: sized for a GPU or TPU; refuses to start on a CPU
    config.strict_reference = False  # reproduce the reference's known hazards instead of their fixes (docs/method.md)

    config.train = section()
    config.train.epochs = 100  # passes over the training set, whatever number of its problems a step takes
    config.train.steps = 0  # stop after so many steps; 0: epochs decide
    config.train.student_tokens = 0  # stop once so many response tokens were sampled; 0: no budget

    config.model = section()
    config.model.path = config_dict.placeholder(str)  # Hugging Face folder: config, safetensors, tokenizer
    config.model.origin = ""  # how to get it, said when it is missing: a Hugging Face repository (OWNER/NAME) or a command
    config.model.dtype = "bfloat16"  # of activations and matmuls: bfloat16 | float32; masters are always float32
    config.model.attention = "auto"  # of packed rows: auto | xla (anywhere) | cudnn (NVIDIA, bfloat16) | splash (TPU)
    config.model.remat = "full"  # activation recomputation a layer: none | dots | full

    config.data = section()
    config.data.train = ()  # files or folders: "NAME:PATH" (NAME picks the reader: data/dataset.py), or a generator's name
    config.data.validation = ()  # validation files, likewise
    config.data.selection = ()  # sets that only choose the best checkpoint and are not reported; (): data.validation chooses
    config.data.origin = ""  # how to get the files, said when they are missing
    config.data.batch_size = 128  # dataset prompts a step
    config.data.max_prompt_length = 512  # tokens after templating; longer prompts are filtered out and counted
    config.data.template = "chat"  # how a question becomes prompt ids: data/templates.py
    config.data.allow_overlap = False  # refuse training questions that are also held-out ones (data/contamination.py)
    config.data.validation_limit = 0  # keep only the first so many rows of each validation set; 0: all

    config.rollout = section()
    config.rollout.engine = "native"  # native (JAX, in process) | vllm (HTTP server)
    config.rollout.n = 8  # rollouts a dataset prompt (G)
    config.rollout.temperature = 1.0  # > 0
    config.rollout.max_model_len = 1024  # tokens of prompt plus response
    config.rollout.dynamic_sampling = 0  # most rounds of further prompts until batch_size groups have a contrast; 0: off
    config.rollout.slots = 128  # native engine: sequences decoded at once
    config.rollout.max_staleness = (
        0  # versions that a rollout's weights may lag behind: 0 | 1 (the next step is rolled out during the update)
    )

    config.vllm = section()  # rollout.engine=vllm
    config.vllm.python = ".venv-vllm/bin/python"  # of the environment that launch/vllm_env.sh makes
    config.vllm.servers = 1  # servers to start, each with the whole model
    config.vllm.attach = ()  # URLs of servers that run already; none is started then
    config.vllm.tensor_parallel = 1  # GPUs a server
    config.vllm.gpu_ids = ()  # GPUs of the servers, one server's after the other's; (): those that are visible
    config.vllm.gpu_memory_utilization = 0.9  # share of a GPU's memory that a server takes
    config.vllm.max_num_seqs = 256  # samples that a server decodes at once
    config.vllm.extra_args = ()  # further options of vLLM's server, "--name=value" each
    config.vllm.request_deadline = 120.0  # seconds without a token after which a server that has requests counts as hung; >= 10

    config.weights = section()  # from the learner to vLLM
    config.weights.route = "orbax"  # orbax (sharded; the learner may be on several hosts) | direct (learner on one host)
    config.weights.folder = ""  # of snapshots: fast, and shared with the servers' hosts; "": in memory, else in the run folder

    config.loop = "reasoning"  # how a prompt becomes scored rollouts: reasoning | agent (with tools) | treerl (a baseline)
    config.treerl = (6, 2, 1, 2)  # M trees a prompt, N forks in each of L rounds, T continuations a fork: M (1 + N L T) responses

    config.agent = section()  # loop=agent: the student and an environment take turns (docs/agents.md)
    config.agent.environment = ""  # lookup | search | code | functions | package.module:Class; a row's agent_name goes before it
    config.agent.retriever_url = ""  # search: a service that finds passages
    config.agent.corpus = (
        ""  # search: or a folder of JSONL files with passages, indexed in memory; "stdlib": Python's documentation
    )
    config.agent.functions = ()  # functions: "package.module:function" each
    config.agent.max_turns = 8  # of the student
    config.agent.turn_tokens = 0  # most tokens of one turn; 0: what the context leaves
    config.agent.observation_tokens = 512  # of a longer observation the middle is left out
    config.agent.tool_seconds = 20.0  # a call that takes longer costs its rollout the verdict
    config.agent.tool_workers = 16  # calls at once
    config.agent.replay = ""  # folder `tools` of an earlier run: its answers are read, and no tool is asked
    config.agent.rollout_seconds = 0.0  # a rollout that takes longer has no verdict; 0: no limit

    config.rewards = section()
    config.rewards.threshold = 0.0  # success: the task's own reward, without bonuses, is above it (types.Grade.succeeds)
    config.rewards.grader = (
        "typed"  # of mathematics: typed | compat_fast | compat_full (as the reference grades: rewards/strict.py)
    )
    config.rewards.extract = "default"  # where its answer stands: default | answer_tag | answer_tag_lenient | mark (after ####)
    config.rewards.weight = 1.0  # of the task's own reward in the total
    config.rewards.extra = ()  # further rewards: "NAME=WEIGHT"; NAME: format | length | repetition | package.module:function
    config.rewards.graders = ()  # graders of your own: "SOURCE=package.module:function"
    config.rewards.workers = 2  # grader processes
    config.rewards.deadline = (
        5.0  # seconds an answer; a worker past it is killed (rewards/service.py); some graders have their own
    )

    config.judge = section()  # for data sources that a language model marks (research, datatask, DSBench, dabstep_research)
    config.judge.base_url = ""  # OpenAI-compatible endpoint; "": none, and such sources are refused
    config.judge.model = ""  # served model name
    config.judge.api_key_env = "OPENAI_API_KEY"  # environment variable that holds the key
    config.judge.enable_thinking = "unset"  # chat_template_kwargs.enable_thinking: true | false | unset (nothing is sent)
    config.judge.timeout = 600.0  # seconds a request
    config.judge.max_tokens = 8192  # reply limit; 0: none is sent (the reference), but 8192 under a budget
    config.judge.max_concurrent = 32  # requests in flight
    config.judge.replay = ""  # folder of an earlier run's replies; a request that is not in it is an error
    config.judge.token_budget = 0  # prompt plus completion tokens; 0: no budget; once spent there are no verdicts

    config.sandbox = section()  # for data sources that run code of the model's (ds1000, DSBench_data_modeling, agents)
    config.sandbox.allow_network = False  # True: run it even where it cannot be isolated, as the trainer's user, with the network

    config.curriculum = section()
    config.curriculum.pool = (
        "forest"  # where hard states are kept: none | forest (the method) | chain | flat | branches_inline | branches | suffixes
    )
    config.curriculum.injection_ratio = 0.25  # hard states a step, as a fraction of data.batch_size; (0, 1]
    config.curriculum.injection_mode = "add"  # add: on top of the dataset prompts (the method) | replace: in their place
    config.curriculum.rollout_n = 0  # rollouts an injected state; 0: rollout.n
    config.curriculum.teacher_rows = True  # the teacher's continuation of an injected state is a row, if its loss is not null
    config.curriculum.min_remaining_tokens = 32  # a state must leave room for so many response tokens
    config.curriculum.failures = "all"  # of a group's failures send to the teacher: all | longest_prefix (the longest right one)
    config.curriculum.retire_after = 1  # forest: groups in a row that must succeed as a whole before a state retires
    config.curriculum.start_from = ""  # forest: a new run begins with that of this run, step or saved forest; "": with none
    config.curriculum.cut = (
        "teacher"  # where a new state ends: teacher (where they part) | own | random | solution (teacher/splice.py)
    )
    config.curriculum.suffix_sft = "off"  # forest, of teacher_loss=sft: off | epoch_local | post_step (curriculum/suffix_sft.py)

    config.branches = section()  # continuations from the middle of a response, a stream of their own (objective.branch_lambda)
    config.branches.segment_method = (
        "tp"  # where a response may be branched, after each: sp sentence | tp tokens | fp equal fifths
    )
    config.branches.tokens_per_node = 50  # tp: tokens of a segment
    config.branches.n_branch_points = 1  # positions chosen of a response
    config.branches.branches_per_point = 8  # branches_inline: continuations of each, in the same step
    config.branches.sample_size_per_step = 32  # branches: buffered positions that a step continues
    config.branches.branches_per_entry = 4  # branches, suffixes: continuations of a position; 0: the teacher's alone (sft)
    config.branches.batch_threshold = 128  # suffixes: corrected failures that are taken at once, as soon as there are so many

    config.teacher = section()
    config.teacher.enabled = True  # False: no teacher, no new states
    config.teacher.base_url = "http://127.0.0.1:8001/v1"  # OpenAI-compatible endpoint; "oracle": serve the rule-based one
    config.teacher.oracle = "carry_chain"  # its rule: carry_chain | arithmetic | solutions:FILE (JSONL of question and answer)
    config.teacher.oracle_error_rate = 0.0  # share of its replies in which a digit is wrong
    config.teacher.model = "Qwen/Qwen3.5-27B-GPTQ-Int4"  # served model name
    config.teacher.api_key_env = "OPENAI_API_KEY"  # environment variable that holds the key
    config.teacher.enable_thinking = "false"  # chat_template_kwargs.enable_thinking: true | false | unset (nothing is sent)
    config.teacher.temperatures = (0.3, 0.7)  # of a failure's replies, in turn
    config.teacher.attempts = 2  # replies asked for a failure until one is verified (strict_reference: until one is parsed)
    config.teacher.timeout = 1800.0  # seconds a request
    config.teacher.max_tokens = 0  # reply limit; 0: none is sent (the reference), but one from max_model_len under a budget
    config.teacher.max_concurrent = 32  # corrections in flight
    config.teacher.synchronous = False  # True: each step waits for its failures' corrections (deterministic)
    config.teacher.min_prefix_match_tokens = 10  # shorter shared prefixes are rejected
    config.teacher.min_prefix_match_ratio = 0.05  # of the student's response
    config.teacher.min_suffix_len = 100  # tokens the teacher must add after the prefix
    config.teacher.replay = ""  # folder of an earlier run's replies; a request that is not in it is an error
    config.teacher.token_budget = 0  # prompt plus completion tokens; 0: no budget
    config.teacher.prices = (0.0, 0.0)  # money a million prompt tokens, and a million completion tokens

    config.objective = section()
    config.objective.advantage = "group_mean"  # r - mean(group) | grpo_std: over the group's deviation | rloo: r - mean(others)
    config.objective.whiten = False  # advantages to mean 0 and deviation 1 over a stream's tokens
    config.objective.zero_gradient_rows = "drop"  # rows of groups without contrast: drop | keep (KL and denominators count them)
    config.objective.overlong = "none"  # answers cut by max_model_len: none (failures) | mask (as if without a verdict) | soft
    config.objective.overlong_buffer = 0  # soft: the reward falls linearly over so many tokens below max_model_len
    config.objective.ratio = "token"  # of policy and old policy: token | sequence (GSPO) | sequence_token (GSPO-token)
    config.objective.clip_low = 0.2  # ratio clipped below 1 - clip_low
    config.objective.clip_high = 0.28  # and above 1 + clip_high
    config.objective.clip_c = 3.0  # dual clip: loss of a negative advantage is at most -A * clip_c; > 1
    config.objective.aggregation = "token_mean"  # over a mini-batch: token_mean | sequence_mean | dr_grpo
    config.objective.length_constant = 0  # dr_grpo: tokens that every row's sum is divided by; > 0
    config.objective.kl_coef = 1e-4  # weight of the KL penalty to the initial policy; 0: no reference pass
    config.objective.kl_type = "low_var_kl"  # low_var_kl = k3 | kl = k1 | mse = k2 | abs | off: as kl_coef=0
    config.objective.kl_stop = 0.0  # KL to the old policy above which a step's further optimizer steps are void; 0: off
    config.objective.entropy_coef = 0.0  # weight of the entropy bonus of student tokens; 0: no entropy gradient
    config.objective.branch_lambda = 1.0  # weight of branch tokens
    config.objective.teacher_loss = "null"  # of teacher tokens: null (no gradient) | sft | luffy | snis
    config.objective.teacher_update = "joint"  # joint: in the PPO steps | post_ppo: in steps of their own (optim.teacher)
    config.objective.teacher_reduction = "mixed_token_mean"  # one mean with student tokens | separate_stream_mean: a mean each
    config.objective.teacher_coef = 1.0  # separate_stream_mean: weight of the teacher's mean
    config.objective.auto_teacher_coef = False  # times a running ratio of the students' part of the loss to the teacher's
    config.objective.luffy_gamma = 0.1  # luffy: a token of probability p weighs p / (p + gamma)
    config.objective.snis_beta = 1.0  # snis: temperature of the weights exp(advantage / beta)
    config.objective.tis_cap = (
        0.0  # truncated importance weight of student tokens, min(p_old / p_rollout, cap); 0: off (released)
    )

    config.optim = section()
    config.optim.lr = 1e-6
    config.optim.schedule = "constant"  # constant | cosine
    config.optim.warmup_steps = 0  # training steps of linear warm-up
    config.optim.b2 = 0.999
    config.optim.weight_decay = 0.01  # decoupled, on all parameters
    config.optim.grad_clip = 1.0  # global norm
    config.optim.teacher = section()  # AdamW of objective.teacher_update=post_ppo: moments of its own, a constant rate
    config.optim.teacher.lr = -1.0  # -1: optim.lr
    config.optim.teacher.mini_batch_rows = 64  # teacher rows of an optimizer step
    config.optim.teacher.allow_partial = False  # True: rows that fill no mini-batch are trained in a smaller one
    config.optim.mini_batch_prompts = 16  # times rollout.n: rows an optimizer step
    config.optim.ppo_epochs = 1  # passes over a step's rows

    config.learner = section()
    config.learner.mesh = (1, -1, 1)  # devices along (data, fsdp, tensor); one -1 takes what is left
    config.learner.micro_batch_tokens = 16384  # padded tokens of one forward-backward pass on all devices
    config.learner.buckets = (256, 512, 768, 1024)  # row lengths that are compiled; the last must hold rollout.max_model_len
    config.learner.share_prefix = True  # compute the prompt that rows share once: packed rows see T / 2 tokens of other rows
    config.learner.logprob_block = 1024  # tokens whose logits exist at once on a device
    config.learner.coordinator = ""  # HOST:PORT of process 0, for a learner of several processes; "": the scheduler's, or alone
    config.learner.process = (0, 1)  # with a coordinator: number of this process, and of how many; 0 runs the training loop

    config.validation = section()
    config.validation.every = 10  # steps; also before the first and after the last; 0: never
    config.validation.n = 1  # answers a problem
    config.validation.temperature = 0.0  # 0: greedy

    config.evaluation = section()  # python -m deepgrpo.evaluate, on the sets of data.validation
    config.evaluation.n = 1  # answers a problem
    config.evaluation.temperature = 0.0  # 0: greedy
    config.evaluation.top_p = 1.0
    config.evaluation.max_new_tokens = 0  # tokens of a response; 0: what rollout.max_model_len leaves after the prompt
    config.evaluation.truncated = "zero"  # an answer that a limit cut off: zero (as in training) | graded (like any other)
    config.evaluation.second_grader = ""  # marks all answers too, for a further column: as rewards.grader; "": none

    config.checkpoint = section()
    config.checkpoint.every = 10  # steps; also at the end and on SIGTERM, SIGINT, SIGHUP, SIGUSR1; 0: only those
    config.checkpoint.keep = 1  # newest checkpoints kept, besides the one of the best validation
    config.checkpoint.best_metric = ""  # validation metric that decides; "": the average over sources
    config.checkpoint.accept_changes = ()  # keys (or config.json, metrics.jsonl, vocabulary) that may differ in a resumed run

    config.diagnostics = section()  # look at a run and change nothing about it; _every: in steps, 0: never
    config.diagnostics.paired_every = 0  # some hard states' problems are rolled out from their prompt, too, to compare
    config.diagnostics.dump_every = 0  # forest: the step's states as text, with origin, counts and rollouts
    config.diagnostics.recover_every = 0  # failed answers to training problems are branched everywhere; also at step 0
    config.diagnostics.score_every = 0  # log-probs of injected states' prefixes and rollouts, by the states' age

    config.telemetry = section()
    config.telemetry.tensorboard = True
    config.telemetry.rollouts_every = 10  # steps between dumps of all rollouts; 0: never
    return config.lock()  # a mistyped key in an experiment is an error with the nearest name
