"""How the kernels of the delta rule cut a state among programs."""

# Rows of V of a program of one warp, of which it has K columns. The rows of a state do not depend on each
# other; with few of them all loads are in flight before the first is used, and all stay in registers.
STEP_ROWS = 8


def recurrent_rows(num_seqs: int) -> int:
    """Choose what STEP_ROWS is for several tokens in a row, each of which waits for the one before.

    Fewer rows make that chain shorter and give a single sequence more programs, but each of them norms q
    and k anew, which with many sequences is what takes the time.
    """
    if num_seqs <= 2:
        return 4
    return 8 if num_seqs < 8 else 16
