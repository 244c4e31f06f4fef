"""What is wrong with a run's model folder, judged within seconds: nothing in here reads a weight.

A file's presence says little: it may be a pointer, a page that says 404, the first half of itself, or of another model. So every
file is looked into, the tokenizer is loaded, and one prompt of each kind is made by the function that the run makes them with.
"""

import difflib
import pathlib
import re
from typing import Any

from deepgrpo.config import folders
from deepgrpo.config.errors import Finding, describe
from deepgrpo.data import dataset, templates
from deepgrpo.data import tokenizer as tokenizer_lib
from deepgrpo.data.tables import SIGNATURES
from deepgrpo.model.config import ModelConfig, read_object
from deepgrpo.weights import hf

NAMED = 3  # missing tensors, and others, that a message names
OBJECTS = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", "special_tokens_map.json")
OBJECTS += ("added_tokens.json", "vocab.json", hf.INDEX)
TEXTS = ("merges.txt", "tokenizer.model", "chat_template.jinja")
OF_TOKENIZER = {name for name in OBJECTS + TEXTS if name not in ("config.json", "generation_config.json", hf.INDEX)}
OF_OTHERS = (  # first bytes of what is found in the place of a model's files, besides what is found in that of data files
    (b"# xet version", "a pointer of Xet, not the file itself"),
    (b"GGUF", "weights in llama.cpp's GGUF format"),
    (b"\x80\x02\x8a\x0a", "a file that torch.save wrote"),
)
LOCAL = ("models/", "runs/", "checkpoints/", "outputs/", "output/")  # no owners of models at Hugging Face
SUPPORTED = (
    "choose a model of a supported family: Qwen2 and Qwen2.5, Qwen3 (dense), Llama 2 to 3.3, SmolLM2, or another one whose "
    "model_type is llama, qwen2 or qwen3, e.g. hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir models/Qwen2.5-1.5B-Instruct"
)
CONVERT = (
    "python -c \"import transformers as t; p = '{folder}'; m = t.AutoModelForCausalLM.from_pretrained(p, dtype='auto'); "
    "{call}save_pretrained(p + '-{to}'); t.AutoTokenizer.from_pretrained(p).save_pretrained(p + '-{to}')\"   (where PyTorch "
    "is installed), then set --config.model.path={folder}-{to}"
)
ORIGINAL = (
    "get the same model as safetensors from where it was published, or have the program that wrote it save it so "
    "(save_pretrained), in a folder of its own, and set --config.model.path"
)
EXPORT = "python -m deepgrpo.export --checkpoint={folder} --out=NEW, then set --config.model.path=NEW"
ELSE = (  # what folders hold that are no Hugging Face model: pattern, what that is, and the way to one
    ("checkpoints/*/manifest.json", "a run of this program", EXPORT),
    ("manifest.json", "one step of a run of this program", EXPORT),
    ("snapshots/*/config.json", "a folder of Hugging Face's cache", "set --config.model.path={found.parent}"),
    ("adapter_config.json", "a LoRA adapter without the model it belongs to", ""),
    ("pytorch_model*.bin", "weights in PyTorch's own format", CONVERT.format(folder="{folder}", call="m.", to="safetensors")),
    ("*.gguf", "GGUF weights of llama.cpp", ORIGINAL),
    ("*.pth", "weights of Meta's or another program in PyTorch's own format", ORIGINAL),
    ("*.pt", "weights in PyTorch's own format", ORIGINAL),
    ("*.ckpt", "a checkpoint of PyTorch Lightning or another program", ORIGINAL),
    ("*.distcp", "shards of FSDP", "merge them with accelerate merge-weights {folder} NEW, then set --config.model.path=NEW"),
    ("zero_to_fp32.py", "shards of DeepSpeed", "merge them: cd {folder} && python zero_to_fp32.py . . --safe_serialization"),
    ("_CHECKPOINT_METADATA", "an Orbax checkpoint", "export it to Hugging Face's format with the program that wrote it"),
    ("_METADATA", "an Orbax checkpoint", "export it to Hugging Face's format with the program that wrote it"),
    ("tf_model.h5", "TensorFlow's weights", ORIGINAL),
    ("flax_model*.msgpack", "Flax's weights", ORIGINAL),
    ("*.npz", "weights of MLX or NumPy", ORIGINAL),
    ("*.onnx", "a model for ONNX", ORIGINAL),
    ("params.json", "a model in its publisher's own format", ORIGINAL),
    (
        "*.safetensors",
        "safetensors of other names",
        "name them model.safetensors, or get the " + hf.INDEX + " that names them",
    ),
    ("*/config.json", "a model one folder deeper", "set --config.model.path={found.parent}"),
)


def problems(config: Any) -> list[Finding]:
    """Everything that stands in the way of a run with `config.model.path`, or that its user should know."""
    folder = pathlib.Path(config.model.path)
    if found := _place(config, folder):
        return [found]
    damaged = {path.name: what for path in _files(folder) if (what := _damage(path))}
    findings = [Finding(f"model: {folder / name}: {what}", _again(config, folder, name)) for name, what in damaged.items()]
    if "config.json" in damaged:
        return findings
    try:
        model = ModelConfig.from_hf(folder)
    except (OSError, ValueError) as error:
        return [*findings, Finding(f"model: {error}", _remedy_of_config(folder))]
    if not any(name.endswith(".safetensors") or name == hf.INDEX for name in damaged):
        findings += _weights(config, folder, model)
    findings += context_problems(config, model)
    if not damaged.keys() & {*OF_TOKENIZER, *tokenizer_lib.END_TOKEN_FILES}:
        findings += _language(config, folder, model)
    return findings


def context_problems(config: Any, model: ModelConfig) -> list[Finding]:
    """rollout.max_model_len against the positions that the model was made for."""
    wanted, limit = config.rollout.max_model_len, model.context_length
    if wanted <= limit:
        return []
    scaled = f" (rope_scaling {dict(model.rope_scaling)['rope_type']} counted)" if model.rope_scaling else ""
    what = (
        f"model: rollout.max_model_len={wanted} is more than the {limit} positions that {config.model.path} was made for{scaled}"
    )
    remedy = f"set --config.rollout.max_model_len={limit} or less (with data.max_prompt_length and learner.buckets below it), or "
    return [Finding(what, remedy + "choose a model with a longer context, or one whose config.json stretches it by rope_scaling")]


#### The place


def _place(config: Any, folder: pathlib.Path) -> Finding | None:
    """What is wrong before any file is looked into: no folder there, or one without a model."""
    path, origin = str(config.model.path), config.model.origin
    if folder.is_file():
        what = f"model: model.path={path} is a file, expected the folder of a model"
        remedy = ORIGINAL if folder.suffix == ".gguf" else f"set --config.model.path={folder.parent}, if the model lies there"
        return Finding(what, remedy)
    if not path.strip() or not folder.is_dir():
        name = re.sub(r"^(https?://huggingface\.co/|hf://)", "", path).strip("/")
        is_path = path.startswith(("/", ".", "~", *LOCAL)) or folder.parent.is_dir() or origin
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not is_path:
            local = f"models/{name.partition('/')[2]}"
            what = (
                f"model: model.path={path} is no folder but the name of a model at Hugging Face; nothing is downloaded by itself"
            )
            return Finding(what, f"hf download {name} --local-dir {local}, then set --config.model.path={local}")
        if path.startswith("~"):
            return Finding(f"model: folder {path} does not exist", f"write it out: --config.model.path={folder.expanduser()}")
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*") if p.is_dir()], n=1)
        hint = f"; did you mean {folder.parent / near[0]}?" if near and not origin else ""
        return Finding(f"model: folder {path or '(empty)'} does not exist{hint}", _get(config, folder))
    try:
        names = {entry.name for entry in folder.iterdir() if not entry.is_dir()}
    except OSError as error:
        return Finding(
            f"model: {describe(error).partition(' -> ')[0]}", "have its owner let you read it, or choose another folder"
        )
    lacking = [] if "config.json" in names else ["config.json"]
    if hf.INDEX in names:
        try:
            hf.weight_files(folder)
        except FileNotFoundError as error:
            lacking += str(error).partition("not there: ")[2].split(", ")
        except ValueError:
            pass  # looked into below, where its content is
    elif hf.SINGLE not in names:
        lacking.append(hf.SINGLE)
    if not ({"tokenizer.json", "tokenizer.model"} & names or {"vocab.json", "merges.txt"} <= names):
        lacking.append("tokenizer.json")
    if not lacking:
        return None
    what = f"model: {folder} lacks {', '.join(lacking)}"
    if hf.SINGLE not in lacking:
        return Finding(what, _get(config, folder))
    for pattern, kind, remedy in ELSE:
        if found := min((path for path in folder.glob(pattern) if path.name != hf.SINGLE), default=None):
            shown = remedy.format(folder=folder, found=found) or _merge(folder, found)
            return Finding(f"{what}; it holds {kind} ({found.relative_to(folder)})", shown)
    return Finding(what, _get(config, folder))


def _get(config: Any, folder: pathlib.Path) -> str:
    """How to get the model. model.origin is about the experiment's own path; the command line clears it for another one."""
    origin = config.model.origin
    if re.fullmatch(r"[\w.-]+/[\w.-]+", origin):
        return f"hf download {origin} --local-dir {folder}   (or point --config.model.path at your copy)"
    if origin:
        return origin
    return f"put a Hugging Face model there (hf download OWNER/NAME --local-dir {folder}), or set --config.model.path"


def _merge(folder: pathlib.Path, adapter: pathlib.Path) -> str:
    try:
        base = str(read_object(adapter).get("base_model_name_or_path") or "BASE")
    except (OSError, ValueError):
        base = "BASE"
    return (
        (
            f'merge it into its base {base}: python -c "import peft, transformers as t; '
            f"m = peft.AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload(); m.save_pretrained('NEW'); "
            f"t.AutoTokenizer.from_pretrained('{base}').save_pretrained('NEW')\", then set --config.model.path=NEW"
        )
        .replace("{", "{{")
        .replace("}", "}}")
    )


#### Files


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those that a run or an engine reads; a link that leads nowhere is one of them."""
    try:
        weights = hf.weight_files(folder)
    except (OSError, ValueError):
        weights = [folder / hf.SINGLE]
    named = [folder / name for name in OBJECTS + TEXTS]
    return [path for path in named + weights if path.is_file() or path.is_symlink()]


def _damage(path: pathlib.Path) -> str:
    """What a file is instead of what its name says; "" where nothing is wrong with it."""
    if not path.is_file():
        return f"is a link to {path.readlink()}, where no file is"
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not start:
        return "is empty (0 bytes)"
    kinds = [(mark, kind) for mark, kind, _ in SIGNATURES] + list(OF_OTHERS)
    if kind := next((kind for mark, kind in kinds if start.lstrip().lower().startswith(mark.lower())), ""):
        return f"is {kind}"
    try:
        if path.suffix == ".json":
            read_object(path)
        elif path.suffix == ".safetensors":
            hf.header(path)
        elif path.suffix != ".model":
            path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return str(error).removeprefix(str(path)).lstrip(": ")
    return ""


def _again(config: Any, folder: pathlib.Path, name: str) -> str:
    """How to get one file of a folder again."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", config.model.origin):
        return f"remove it, then hf download {config.model.origin} {name} --local-dir {folder}"
    if config.model.origin:
        return f"remove {folder}, then {config.model.origin}"
    return f"get {name} again from where the folder came from (git lfs pull in a clone, hf download OWNER/NAME {name}, or a copy)"


def _remedy_of_config(folder: pathlib.Path) -> str:
    content = read_object(folder / "config.json")
    if content.get("quantization_config") or content.get("quantization"):
        return "take the model that it was quantised from, or dequantise it: " + CONVERT.format(
            folder=folder, call="m.dequantize().", to="dequantised"
        )
    return SUPPORTED


def _weights(config: Any, folder: pathlib.Path, model: ModelConfig) -> list[Finding]:
    """Names, shapes and types in the files' headers against those that config.json calls for."""
    try:
        wrong = hf.mismatches(folder, model)
    except (OSError, ValueError) as error:
        return [Finding(f"model: {error}", "remove what is not meant, or get the folder again")]
    if not wrong:
        return []
    missing, other = ([line for line in wrong if (": missing, " in line) is absent] for absent in (True, False))
    shown = [*missing[:NAMED], *other[:NAMED]]
    more = [f"and {len(wrong) - len(shown)} more"] if len(wrong) > len(shown) else []
    what = "\n   ".join([f"model: the tensors in {folder} are not those that its config.json describes:", *shown, *more])
    text, wrapper = " ".join(wrong), re.search(r"(?m)^(\S+\.)model\.norm\.weight \(", "\n".join(other))
    if re.search(r"lora_|base_model\.model\.", text):
        remedy = _merge(folder, folder / "adapter_config.json")
    elif wrapper:
        remedy = f"save the model without what wraps it: its tensors' names begin with {wrapper.group(1)}"
    elif re.search(r"qweight|weight_scale|\.scales|absmax|found (F8|I8|U8|I32|U32)", text):
        remedy = "these weights are quantised: take the model that they were made from, or dequantise it"
    elif "found F64" in text:
        remedy = "save the model as bfloat16 or float32"
    elif wrong[0].startswith("lm_head.weight: missing") and len(wrong) == 1:
        remedy = "if its embeddings are tied, set tie_word_embeddings to true in config.json; else get the file with the head"
    elif any(name.startswith("model.embed_tokens.weight (") for name in wrong):
        remedy = "let vocab_size in config.json be the rows of the embedding, or get config.json and weights of one model"
    else:
        remedy = "get config.json and weights of one model, all files"
    return [Finding(what, remedy)]


#### Tokenizer, template, end tokens


def _language(config: Any, folder: pathlib.Path, model: ModelConfig) -> list[Finding]:
    path, template = str(folder), config.data.template
    try:
        tokenizer_lib.named_end_tokens(path)
    except ValueError as error:
        return [Finding(f"model: {error}", "name the ids of the tokens that end a response, or take the key out")]
    try:
        tokenizer = tokenizer_lib.load_tokenizer(path)
        vocabulary = tokenizer_lib.vocabulary(tokenizer)
    except Exception as error:  # whatever a library of others makes of damaged files
        what = f"model: the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        return [Finding(what, "get tokenizer.json and tokenizer_config.json of this model again, which need no further package")]
    findings = []
    if (folder / "tokenizer.json").is_file():
        stated, used = folders.tokens(read_object(folder / "tokenizer.json")), tokenizer.get_vocab()
        if moved := next((token for token, number in stated.items() if used.get(token) != number), None):
            what = f"model: tokenizer.json in {folder} numbers {moved!r} {stated[moved]}, loaded it is {used.get(moved)}"
            findings.append(Finding(what, "let its vocabulary hold the token with the same id, or take the token out"))
    if vocabulary.bound > model.vocab_size:
        what = f"model: the tokenizer in {folder} has ids up to {vocabulary.bound - 1}, the embedding {model.vocab_size} rows"
        resize = f"t.AutoModelForCausalLM.from_pretrained('{folder}').resize_token_embeddings({vocabulary.bound})"
        take = "take the tokenizer that the model was trained with (without tokens that were added later)"
        findings.append(Finding(what, f"{take}, or give the model rows for them: transformers' {resize}, saved to a new folder"))
    elif vocabulary.bound < 0.8 * model.vocab_size:
        what = f"model: the tokenizer in {folder} has ids up to {vocabulary.bound - 1}, the embedding {model.vocab_size} rows"
        findings.append(Finding(what, "make sure that it is the tokenizer of this model", fatal=False))
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and limit < config.rollout.max_model_len:
        what = f"model: rollout.max_model_len={config.rollout.max_model_len}, and {folder}/tokenizer_config.json says {limit}"
        findings.append(Finding(what, "lower it, unless the model was trained on longer texts", fatal=False))
    try:
        stop_ids = tokenizer_lib.stop_ids(path, tokenizer)
        findings += _end_tokens(folder, tokenizer, vocabulary, stop_ids)
    except ValueError as error:
        stop_ids = ()
        findings.append(Finding(f"model: {error}", f"name the end token: eos_token_id in {folder}/generation_config.json"))
    try:
        if templates.prints_date(template, tokenizer):
            kept = "nothing to do: its prompts keep the time at which the run began (`started` in its config.json), on any day"
            findings.append(Finding("model: the chat template prints the date", kept, fatal=False))
        findings += _prompts(config, tokenizer)
        end = templates.turn_end(template, tokenizer)
    except ValueError as error:
        return [*findings, Finding(f"model: {folder}: {error}", dataset.TEMPLATE_REMEDY)]
    if end and stop_ids and end[1] not in stop_ids:
        closes = f"data.template={template} closes an assistant's turn with {end[0]!r} ({end[1]})"
        what = f"model: {closes}, which is none of the end tokens {tokenizer_lib.shown(stop_ids, tokenizer)}: answers may run on"
        remedy = f"add {end[1]} to eos_token_id in {folder}/generation_config.json, unless the model ends its answers otherwise"
        findings.append(Finding(what, remedy, fatal=False))
    return findings


def _end_tokens(folder: pathlib.Path, tokenizer: Any, vocabulary: Any, stop_ids: tuple[int, ...]) -> list[Finding]:
    """End tokens that no response can have, or that every response may have by chance."""
    findings, where = [], f"eos_token_id in {folder}'s {' and '.join(tokenizer_lib.END_TOKEN_FILES)}"
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for number in stop_ids:
        if number not in vocabulary:
            what = f"model: the end token {number} is no token of the tokenizer, whose ids go up to {vocabulary.bound - 1}"
            findings.append(Finding(what, f"correct {where}"))
        elif number not in special:
            shown = tokenizer_lib.shown((number,), tokenizer)
            what = f"model: the end token {shown} is an ordinary token: answers end wherever it occurs"
            findings.append(Finding(what, f"correct {where}, unless this is meant", fatal=False))
    return findings


def _prompts(config: Any, tokenizer: Any) -> list[Finding]:
    """Makes one prompt of each sequence of roles in the first set, by the run's own function.

    Raises:
      ValueError: the chat template refuses one.
    """
    spec = next(iter([*config.data.train, *config.data.validation]), "")
    try:
        rows = dataset.usable_rows(spec, config.data.template, config.loop == "agent") if spec else []
    except (OSError, ValueError):
        rows = []  # which the check of the data says
    kinds = {tuple(message["role"] for message in row.messages or ()): row for row in reversed(rows)}
    for row in kinds.values():
        made = tokenizer.decode(dataset.prompt_ids(row, config.data.template, tokenizer))
        if lost := sorted({c for c in row.question if not c.isspace()} - set(made)):
            letters = ", ".join(map(repr, lost[:10]))
            what = f"model: the tokenizer in {config.model.path} has no token for {letters} in the first question of {spec}"
            most = 2 * len(lost) > len(set(row.question))  # then it is no tokenizer for such text at all
            return [Finding(what, "make sure that it is the tokenizer of this model, and a model for such text", fatal=most)]
    if not rows:
        templates.TEMPLATES[config.data.template]("QUESTION", tokenizer)
    return []
