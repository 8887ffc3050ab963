"""How the kernels of the delta rule cut a state among programs."""

# Rows of V of a program of one warp, of which it has K columns. The rows of a state do not depend on each
# other; with few of them all loads are in flight before the first is used, and all stay in registers.
STEP_ROWS = 8
# Of several tokens in a row each waits for the one before. Fewer rows make that chain shorter and give a
# single sequence more programs, but each of them norms q and k anew.
RECURRENT_ROWS = 8
