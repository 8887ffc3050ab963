"""Flash Linear Attention's own class: what it saves is converted, and gives the logits that it gave."""

import sys
from pathlib import Path

import pytest
import torch

from support.converted import IDS, convert_to, engine_logits
from support.fla_model import FlaModel, fla_config

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        sys.modules.get("fla", ...) is None,
        reason="fla is switched off for the transformers oracle",
    ),
]


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_fla_saved(tmp_path: Path) -> None:
    models = pytest.importorskip("fla.models")
    settings = fla_config()
    settings = {
        k: v for k, v in settings.items() if k not in ("architectures", "model_type", "dtype")
    }
    model = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(**settings))
    # Weights off their initial values; strict: names and shapes are FLA's own.
    model.load_state_dict(FlaModel(fla_config()).state_dict())
    model.save_pretrained(tmp_path / "src")
    model.cuda().eval()
    for layer in model.model.layers:
        layer.attn.mode = "fused_recurrent"  # no tensor cores: fp32 throughout
    with torch.no_grad():
        logits = model(torch.tensor([IDS], device="cuda"), use_cache=False).logits[0].cpu()
    convert_to(tmp_path / "src", tmp_path / "dst")
    torch.testing.assert_close(engine_logits(tmp_path / "dst"), logits, rtol=0, atol=2e-4)
