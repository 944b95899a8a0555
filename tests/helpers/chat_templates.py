"""Chat templates that behave like seven families' templates, and a small tokenizer with their special tokens."""

from tokenizers import AddedToken

from nanorlhf.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

MARKS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|user|>",
    "<|end|>",
    "<|assistant|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
# family: template, the end of a turn, the tokenizer's EOS before data.chat
TEMPLATES = {
    # marks around every message; a default system message if there is none
    "chatml": (
        "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{%- endif %}"
        "{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}",
        "<|im_end|>",
        "<|endoftext|>",
    ),
    # the system message inside the first user message; BOS and EOS around each turn; no generation prompt
    "llama2": (
        "{%- set ns = namespace(system='') -%}\n"
        "{%- for m in messages -%}\n"
        "    {%- if m['role'] == 'system' -%}\n"
        "        {%- set ns.system = '<<SYS>>\n' + m['content'].strip() + '\n<</SYS>>\n\n' -%}\n"
        "    {%- elif m['role'] == 'user' -%}\n"
        "        {{- bos_token + '[INST] ' + ns.system + m['content'].strip() + ' [/INST]' -}}\n"
        "        {%- set ns.system = '' -%}\n"
        "    {%- else -%}\n"
        "        {{- ' ' + m['content'].strip() + ' ' + eos_token -}}\n"
        "    {%- endif -%}\n"
        "{%- endfor -%}\n",
        "</s>",
        "</s>",
    ),
    # one BOS, a header per message, contents trimmed
    "llama3": (
        "{{ bos_token -}}\n"
        "{% for m in messages %}\n"
        "    {{- '<|head|>' ~ m['role'] ~ '<|/head|>\n\n' ~ (m['content'] | trim) ~ '<|eot|>' }}\n"
        "    {%- if loop.last and add_generation_prompt %}\n"
        "        {{- '<|head|>assistant<|/head|>\n\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}",
        "<|eot|>",
        "<|endoftext|>",
    ),
    # strict about turns; rejects a system message
    "mistral": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('after user comes assistant, and so on') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
        "</s>",
        "</s>",
    ),
    # headers are plain text, except the user's; generation blocks, loop controls, tojson and a macro
    "zephyr": (
        "{% macro head(role) %}{{ '<|user|>' if role == 'user' else '=' ~ role ~ '=' }}\n{% endmacro %}"
        "{% for m in messages %}{% if not m.content and m.role == 'system' %}{% continue %}{% endif %}"
        "{{ head(m.role) }}{% if m.role == 'system' %}{{ {'text': m.content} | tojson }}{{ '<|end|>\n' }}"
        "{% elif m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}",
        "<|end|>",
        "<|endoftext|>",
    ),
    # EOS ends a conversation, unless it asks for a reply; turns end in another token
    "phi3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|end|>",
        "<|endoftext|>",
    ),
    # one BOS, no EOS; a differently named role; the system message inside the first user message
    "gemma": (
        "{{ bos_token }}{% set first = '' %}{% set rest = messages %}"
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% endif %}"
        "{% for m in rest %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{ (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
        "<|endoftext|>",
    ),
}  # fmt: skip


def chat_tokenizer(family: str, directory=None) -> Tokenizer:
    """Make a tokenizer with a family's template; with a directory, save and load it there."""
    plain = train_tokenizer(["say yes or no, my cat sat on the mat", "what is it? it is a cat."] * 3, 300)
    plain.backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    template, _, eos = TEMPLATES[family]
    bos = "<|begin|>" if family == "llama3" else "<s>"
    eos_id = plain.backend.token_to_id(eos)
    tokenizer = Tokenizer(plain.backend, eos_id, plain.pad_id, bos, template)
    if directory is None:
        return tokenizer
    tokenizer.save(directory)
    return load_tokenizer(directory)
