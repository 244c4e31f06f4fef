"""Names that other projects give to data sources, and the name here of the grader that marks such answers.

A file keeps its own names, in metrics too; only the grader is looked up by the name here. DeepScaleR's grader takes a boxed
answer or a declared one ("Answer: 34"), which is what prompts in the manner of DAPO ask for.
"""

ALIASES = {
    **dict.fromkeys(("openai/gsm8k", "gsm8k", "openai/grade-school-math"), "GSM8K"),
    **dict.fromkeys(("lighteval/math", "huggingfaceh4/math-500", "math-500", "math500", "hendrycks_math"), "MATH"),
    **dict.fromkeys(("digitallearninggmbh/math-lighteval", "eleutherai/hendrycks_math", "math-ai/math500"), "MATH"),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning", "bytedtsinghua-sia/dapo-math-17k"), "DeepScaleR"),
    **dict.fromkeys(("deepscaler", "agentica-org/deepscaler-preview-dataset", "open-r1/openr1-math-220k"), "DeepScaleR"),
    **dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"), "DeepScaleR"),
    **dict.fromkeys(("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads", "ai-mo/numinamath-tir"), "DeepScaleR"),
    **dict.fromkeys(("maxwell-jia/aime_2024", "huggingfaceh4/aime_2024", "math-ai/aime24", "math-ai/aime25"), "DeepScaleR"),
    **dict.fromkeys(("opencompass/aime2025", "ai-mo/aimo-validation-aime"), "DeepScaleR"),
    **dict.fromkeys(("amc23", "math-ai/amc23", "ai-mo/aimo-validation-amc"), "AMC"),
    **dict.fromkeys(("minerva_math", "minervamath", "math-ai/minervamath"), "Minerva"),
    **dict.fromkeys(("olympiad_bench", "math-ai/olympiadbench"), "OlympiadBench"),
    **{f"searchr1_{name}": name for name in ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")},
}
CASELESS = {name.lower(): name for name in ("GSM8K", "MATH", "AMC", "Minerva", "OlympiadBench", "AIME24")} | ALIASES
PREFIXES = {"aime": "DeepScaleR"}  # verl: every source that begins so


def canonical(source: str) -> str:
    """The name here of a source's grader: `source` itself if no other is known for it."""
    folded = source.lower()
    if source in ALIASES.values():
        return source
    return CASELESS.get(folded) or next((name for prefix, name in PREFIXES.items() if folded.startswith(prefix)), source)
