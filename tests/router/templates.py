"""Copies of the bundled model with chat templates of other families: its weights, their formats."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness import model_copy

HERMES = """{%- if tools %}<|system|>Tools: {{ tools | tojson }} <tool_call>...</tool_call><|end|>
{%- endif %}{%- for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|end|>{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
THINKING = (
    HERMES
    + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
)


def with_template(folder: Path, template: str) -> Path:
    """A copy of the bundled model with this chat template."""
    model = model_copy(folder)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return model
