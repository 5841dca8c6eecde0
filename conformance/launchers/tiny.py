"""A model of a few ten thousand random weights, with a byte-level tokenizer and ChatML, and a recipe for two machines."""

from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

RECIPE = """
# Random weights and rewards: what is computed counts, not what is learnt.
[run]
name = "launched"
checkpoint_every = 1
keep = 1000

[model]
source = "{model}"
context = 512

[engine]
micro_batch_tokens = 600

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 2
words = 0.0
train = 500

[agent]
tools = ["calculator"]
tool_prompt = "compact"
max_turns = 2
max_tokens = 60

[reward]
scorer = {{ kind = "python", file = "score.py", solution = "whole", workers = 6 }}
unfinished = -0.2

[eval]
tasks = 2
unseen_wordings = 0

[[phase]]
kind = "sft"
demonstrations = 4
batch = 4
learning_rate = 1e-4

[[phase]]
kind = "rl"
steps = {steps}
groups = 2
group_size = 3
learning_rate = 1e-4

[cluster.learner]
kind = "torch"
start = true
python = "{python}"
nodes = 2
processes = 1
start_seconds = 240
call_seconds = 120
restarts = 9
"""
# A step takes a second, so that the run still exists when it is disturbed.
SCORE = """
import time
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(1)
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""


def make_model(directory: Path) -> None:
    """Writes the model in the Hugging Face layout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from byte_level import byte_level

    chat = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(tuple(SPECIAL)), eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    chat.save_pretrained(directory)
    ids = chat.convert_tokens_to_ids(SPECIAL)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(chat),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[ids[2], ids[0]],
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
