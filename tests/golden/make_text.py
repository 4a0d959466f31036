"""Makes tests/golden/text_*: tiny tokenizers, and what transformers does with them.

Run from the root of the repository, in an environment with transformers 5:

    python -m tests.golden.make_text

Each `text_<kind>/` is a directory that `save_pretrained` wrote; `text_expected.json` holds, by kind,
ids and decoded text of plain texts, and text and ids of conversations through the chat template.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

GOLDEN_DIR = Path(__file__).parent
CORPUS = [
    "Once upon a time, in a small village by the sea, there was a wise old wizard.",
    "He lived in a tower surrounded by a beautiful garden. It's 1024 miles away; they'll come in 2026!",
    "The quick brown fox jumps over the lazy dog. def add(a, b):\n    return a + b\n\n\nprint(add(1, 23))",
    "Größe, déjà vu, naïve café. 안녕하세요 세계. 你好，世界。 Привет, мир! 🙂👩‍💻🇩🇪",
] * 4
TEXTS = [
    "",
    "a",
    " leading space",
    "trailing space ",
    "Once upon a time, in a small village by the sea,",
    "It's 123456 o'clock; they'll  say\n\n  WE'RE   here!!\t\r\n",
    "emoji 🙂, ZWJ 👩‍💻 and 👨‍👩‍👧‍👦, flag 🇩🇪, keycap 1️⃣",
    "한글 안녕하세요, decomposed 한글; cafe\u0301 is not café",
    "Ελληνικά, עברית, العربية, हिन्दी, ไทย, 中文",
    "rare \u2603 \U0001d54f \U0010ffff \x07 and ligature ﬁ",
    "<|im_start|>user\nspecial in text<|im_end|> [INST] <s> </s>",
]
USER = {"role": "user", "content": "Hi <b>there</b> & 'you' 🙂"}
ANSWER = {"role": "assistant", "content": "  Hello! "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
AGAIN = {"role": "user", "content": "안녕, wie geht's?"}
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "enum": ["<a>", 1.5]}}}]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "open": {"messages": [USER], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [SYSTEM, USER, ANSWER, AGAIN]},
    "answered": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [USER], "tools": TOOLS},
    "option": {"messages": [USER], "enable_thinking": False},
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content.strip() + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{% for message in messages %}
    {% if loop.index0 > 8 %}
        {% break %}
    {% endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|start|>assistant<|end|>\\n\\n' }}
{% endif %}
"""
HEADERS_TOOLS = "{{ bos_token }}{{ tools | tojson(indent=2) }}{% set ns = namespace(n=0) %}" + (
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }}{% endfor %}"
)
INST = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '<</SYS>>\\n\\n' %}{% else %}\
{% set rest = messages %}{% set system = '' %}{% endif %}{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def trained_bpe(pattern: str) -> Tokenizer:
    """Byte-level BPE of 400 tokens."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet)))
    return backend


def byte_level() -> Any:
    """Qwen2's own class around a trained vocabulary: no BOS, three tokens that only a chat knows."""
    model = json.loads(trained_bpe(LLAMA3).to_str())["model"]
    made = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])
    made.add_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    made.add_tokens([AddedToken("<think>", special=False)])
    made.eos_token = "<|im_end|>"
    made.chat_template = CHATML
    return made


def headers() -> Any:
    """In the manner of Llama 3: BOS by the post-processor and in the template, whole words first."""
    backend = trained_bpe(LLAMA3)
    fresh = json.loads(backend.to_str())
    fresh["model"]["ignore_merges"] = True
    fresh["normalizer"] = None
    backend = Tokenizer.from_str(json.dumps(fresh))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|eot|>", "<|start|>", "<|end|>"])
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", begin)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|eot|>")
    made.chat_template = {"default": HEADERS, "tool_use": HEADERS_TOOLS}
    return made


def byte_fallback() -> Any:
    """In the manner of Llama 2: SentencePiece BPE with byte tokens, BOS by the post-processor."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = [" ".join(CORPUS).replace("🙂", "").split(" ")]
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: merges within words
    backend.train_from_iterator(
        [w for line in words for w in line],
        trainers.BpeTrainer(vocab_size=480, special_tokens=specials, limit_alphabet=60),
    )
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = INST
    return made


def unigram() -> Any:
    """A unigram model with byte tokens; adds BOS, and its template leaves BOS out."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["model"]["vocab"] += [[f"<0x{b:02X}>", -20.0] for b in range(256)]
    state["model"] |= {"byte_fallback": True, "unk_id": 0}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = PLAIN
    return made


KINDS = {"byte_level": byte_level, "headers": headers, "byte_fallback": byte_fallback, "unigram": unigram}


def expectations(made: Any) -> dict[str, Any]:
    """What transformers does with one tokenizer."""
    texts = []
    for text in TEXTS:
        ids = made(text)["input_ids"]
        texts.append(
            {
                "text": text,
                "ids": ids,
                "bare_ids": made(text, add_special_tokens=False)["input_ids"],
                "decoded": made.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            }
        )
    chats = {}
    for name, chat in CHATS.items():
        options = {"add_generation_prompt": True} | chat
        text = made.apply_chat_template(**{"conversation": options.pop("messages")}, **options, tokenize=False)
        ids = made.apply_chat_template(
            **{"conversation": chat["messages"]}, **options, tokenize=True, return_dict=False
        )
        chats[name] = {"options": chat, "text": text, "ids": ids}
    return {"texts": texts, "chats": chats}


def main() -> None:
    expected = {}
    for kind, make in KINDS.items():
        directory = GOLDEN_DIR / f"text_{kind}"
        shutil.rmtree(directory, ignore_errors=True)
        made = make()
        made.save_pretrained(directory)
        expected[kind] = expectations(type(made).from_pretrained(directory))
    text = json.dumps(expected, ensure_ascii=True, indent=None, separators=(",", ":"))
    (GOLDEN_DIR / "text_expected.json").write_text(text.replace('{"text":', '\n{"text":') + "\n")


if __name__ == "__main__":
    main()
