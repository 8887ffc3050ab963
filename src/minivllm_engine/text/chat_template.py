"""What a chat template can do."""

from minivllm_engine.text.tokenizer import Tokenizer


def switches_thinking(tokenizer: Tokenizer) -> bool:
    """Tell whether the chat template looks at `enable_thinking`."""
    return "enable_thinking" in (tokenizer.chat_template or "")
