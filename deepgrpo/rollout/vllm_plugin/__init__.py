"""Files that run inside vLLM's processes, in vLLM's own environment; nothing else in deepgrpo imports them.

`vllm_server` puts this folder, and nothing else of ours, on PYTHONPATH there, so they are top-level modules; hence long names.
They import neither JAX nor the rest of deepgrpo.

    deepgrpo_supervisor  the parent of the server: no process outlives it, nor the trainer (standard library only)
    deepgrpo_launcher    starts vLLM's command line, CPU or GPU build, and ties its children to their parents
    deepgrpo_guard       middleware: a token on every path but /health; GET /deepgrpo/identity
    deepgrpo_generate    POST /deepgrpo/generate: samples and log-probs in plain lists
    deepgrpo_worker      worker extension: the method `deepgrpo_load`
    deepgrpo_snapshot    what a snapshot's files say about themselves (standard library only)
"""
