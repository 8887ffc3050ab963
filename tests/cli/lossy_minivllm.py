"""The program `minivllm` with a planted bug: a snapshot loses the recurrent state, and keeps the rest."""

from minivllm_cli.main import main
from minivllm_engine.tensors.cache_pool import CachePool

_save = CachePool.save


def _save_badly(self, slots, snapshots):
    _save(self, slots, snapshots)
    for tensor in self.recurrent_snapshots:
        tensor[list(snapshots)] = 0


CachePool.save = _save_badly

if __name__ == "__main__":
    main()
