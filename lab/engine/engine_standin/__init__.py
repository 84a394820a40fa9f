"""A stand-in for the v100-skinny engine, for the lab. It computes nothing and holds no GPU.

What is true to the engine: the command line (strict), the boot log's lines, the process tree, the
HTTP surface, MTP timing (rounds, acceptance length, slots, the collapse above two sequences) and
the ways it dies. What is invented: the text of the answers and the tokenizer.

Environment variables (all optional, all for the lab):
    LAB_ENGINE_TIME_SCALE  factor on every simulated second, e.g. 0.05 (default 1)
    LAB_ENGINE_TIMING      path of a timing file to use in place of the packaged timing.json
    LAB_ENGINE_FAULTS      faults to show: names separated by commas, or the path of a JSON list of
                           names (a missing file means no fault); names in engine_standin.faults
    LAB_GPU_STATE          folder in which GPU memory is registered (default /run/lab-gpu); it is
                           read by the nvidia-smi stand-in

Exit codes: 0 stopped, or the engine died (as vLLM does); 1 the boot failed; 2 wrong arguments.
"""
