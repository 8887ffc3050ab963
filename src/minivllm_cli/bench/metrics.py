"""`bench --help-metrics`: what each figure means."""

METRICS = """\
TTFT            time to first token: from a request's arrival to its first token
queue           the part of it before the first step that had the request
ITL             inter-token latency: each gap between two tokens of a request
TPOT            time per output token: (E2E - TTFT) / (tokens - 1); none for a single token
E2E             from a request's arrival to its last token
tok/s           tokens / wall time of the timed part: prompt tokens of a prefill, else output tokens
in/out          tokens of a repetition as they were counted, of all requests together
limit           floor / measured time of a decode step. The floor is the bytes that a step must move
                (weights once, states read and written, keys and values read; from the model's
                config) / the speed at which this device reads memory, measured at the start
hit             share of the prompt tokens that came from the prefix cache; kv_hit in JSON counts
                tokens whose keys and values were there, with a state to go on from or without
speed-up        tok/s of an arm / of the first arm, repetition by repetition: median ± half of the
                spread
tokens equal    requests that got the same greedy tokens in both arms, over all repetitions
pays back       seconds of graph capture / (eager ITL - graph ITL): decode steps until then
peak            bytes that tensors held at most in a repetition (CUDA only)

What is timed: of prefill, mixed, prefix and jsonl everything from the first step to the last token;
of decode only the steps after all prompts are in the cache, while all requests run side by side.
naive computes all tokens before each token again. cold does without the prefix cache, warm finds the
shared prefixes there. Each sample starts from an empty cache, with prompts of fresh random token ids.
A table shows medians with (min–max), and percentiles of latencies; JSON has all samples.
"""
