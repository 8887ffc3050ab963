"""Sentences about a plan that a user should read."""

from minivllm_engine.checkpoint.names import HEAD
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.styles import FUSED_DELTANET
from minivllm_engine.core.escape import escape, listed
from minivllm_engine.core.units import count_text
from minivllm_engine.model_config.reader import unknown_model_type


def plan_notes(
    source: Source,
    named: list[NamedTensor],
    layouts: Layouts,
    options: ConvertOptions,
    missing: tuple[str, ...],
    *,
    head_differs: bool,
) -> list[str]:
    """
    Args:
        missing: targets that are left out, as allowed.
        head_differs: the head turned out not to be the embedding.
    """
    notes = []
    unknown = unknown_model_type(source.config)
    if unknown is not None and "qwen3_next" not in unknown:
        notes.append(
            f"{source.config_file}: model_type {escape(repr(unknown))} is not known; the keys are those "
            "of this family, and the weights are taken for one of it"
        )
    if head_differs:
        notes.append(
            f"{HEAD} differs from the embedding although {source.config_file} says "
            "tie_word_embeddings: both are kept, and the target is untied"
        )
    if not any(file.name == "tokenizer.json" for file in source.side_files):
        notes.append(
            f"{source.directory} has no tokenizer.json: copy the model's into the target to run it, "
            "with tokenizer_config.json, chat_template.jinja and generation_config.json"
        )
    notes += _unused(named, options, layouts)
    if missing:
        notes.append(
            f"without {count_text(len(missing), 'tensor')}, as --allow-missing says ({listed(missing, 2)}): "
            "the target is marked incomplete, and the engine will not load it"
        )
    return notes


def _unused(named: list[NamedTensor], options: ConvertOptions, layouts: Layouts) -> list[str]:
    """Options that decided nothing: often a slip of the pen."""
    names = {tensor.bare.tensor for tensor in named if not tensor.dropped}
    notes = []
    if options.qkvz_layout and not names & FUSED_DELTANET:
        notes.append(
            "qkvz_layout decides nothing here: no tensor is called in_proj_qkvz or in_proj_ba"
        )
    if options.q_gate_layout and not any("q_proj" in name or "qkv_proj" in name for name in names):
        notes.append("q_gate_layout decides nothing here: no layer has attention")
    for source, target in options.renames:
        if not any(tensor.renamed_by == source for tensor in named):
            what = "the drop of" if target is None else "the rename of"
            notes.append(f"{what} {escape(repr(source))} matches no tensor")
    held, wanted = [tensor.entry.name for tensor in named], list(layouts.expected)
    for word, globs, among in (
        ("allow_unmatched", options.allow_unmatched, held),
        ("allow_missing", options.allow_missing, wanted),
    ):
        notes += [
            f"{word} {escape(repr(glob))} matches no tensor"
            for glob in globs
            if not any(matches(name, [glob]) for name in among)
        ]
    return notes
