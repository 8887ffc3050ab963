"""Operations with state or with sequence boundaries, one folder each; `reference.py` is plain PyTorch."""
