"""`everydepth generate`: text to standard output, how fast it came to standard error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from tests.helpers.training import vit
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from everydepth.cli.generate import _summary  # pyright: ignore[reportPrivateUsage]
from everydepth.cli.loading import load_to_run
from everydepth.cli.main import build_app
from everydepth.errors import DepthError, UnsupportedModelError
from everydepth.exits.generation import generate
from everydepth.exits.generation.result import GenerationStats

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["generate", *arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that knows ten words."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    )
    hf.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def expected(folder: Path, text: str, new: int, **options: int) -> str:
    model = hf.LlamaForCausalLM.from_pretrained(folder).eval()
    said = generate(
        model, [WORDS.index(word) for word in text.split()], max_new_tokens=new, **options
    )
    return " ".join(WORDS[token] for token in said.sequences[0].tolist()) + "\n"


def test_the_prompt_and_its_continuation_are_printed(folder: Path) -> None:
    result = run(str(folder), "--prompt", "one two", "-n", "8")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(folder, "one two", 8)
    assert "8 tokens" in result.stderr


def test_drafting_prints_the_same_text_and_how_much_was_accepted(folder: Path) -> None:
    plain = run(str(folder), "-p", "three", "-n", "12")
    always = ("--draft-depth", "1", "--draft-always")
    drafted = run(str(folder), "-p", "three", "-n", "12", *always)
    assert drafted.stdout == plain.stdout
    assert "of drafts accepted" in drafted.stderr


def test_the_text_itself_and_a_depth_can_both_draft(folder: Path) -> None:
    plain = run(str(folder), "-p", "two two two", "-n", "12")
    both = ("--draft-depth", "0", "--draft-depth", "1", "--draft-always")
    drafted = run(str(folder), "-p", "two two two", "-n", "12", *both)
    assert drafted.stdout == plain.stdout
    assert "of drafts accepted" in drafted.stderr


def test_a_depth_prints_what_that_depth_says(folder: Path) -> None:
    result = run(str(folder), "-p", "six two", "-n", "8", "--depth", "1")
    assert result.stdout == expected(folder, "six two", 8, depth=1)


def test_several_prompts_are_printed_one_a_line(folder: Path) -> None:
    result = run(str(folder), "-p", "one two", "-p", "five", "-n", "6")
    assert result.stdout == expected(folder, "one two", 6) + expected(folder, "five", 6)


def test_without_a_seed_the_one_that_was_drawn_is_said_and_repeats_the_sample(
    folder: Path,
) -> None:
    before = torch.get_rng_state()
    drawn = run(str(folder), "-p", "one", "-n", "12", "--sample")
    assert torch.equal(torch.get_rng_state(), before)
    seed = drawn.stderr.rsplit("--seed ", 1)[1].strip()
    again = run(str(folder), "-p", "one", "-n", "12", "--sample", "--seed", seed)
    assert again.stdout == drawn.stdout


def test_a_seed_prints_the_same_sample_again(folder: Path) -> None:
    arguments = (str(folder), "-p", "one", "-n", "12", "--sample", "--top-k", "5", "--seed")
    assert run(*arguments, "1").stdout == run(*arguments, "1").stdout != run(*arguments, "2").stdout


def test_a_depth_the_model_does_not_have_is_a_sentence(folder: Path) -> None:
    result = run(str(folder), "-p", "one", "--depth", "4")
    assert isinstance(result.exception, DepthError)
    assert str(result.exception) == "depth 4, but LlamaForCausalLM has 3 blocks; use 1 to 3"
    assert result.stdout == ""  # not even the prompt, so the error begins a line


def test_drafting_that_does_not_pay_is_said() -> None:
    plain = GenerationStats(seconds=1.0, tokens=1, passes=(1,))
    assert _summary(plain, drafting=False) == "1 token, 1 tokens/s"
    assert "drafting would have been slower" in _summary(plain, drafting=True)


def test_a_model_that_does_not_write_is_refused_before_its_tokenizer(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    result = run(str(tmp_path), "-p", "one")
    assert isinstance(result.exception, UnsupportedModelError)
    assert "predicts classification, not the next token" in str(result.exception)


def test_float16_runs_in_float32_on_a_cpu(folder: Path, tmp_path: Path) -> None:
    hf.LlamaForCausalLM.from_pretrained(folder).half().save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    found = load_to_run(str(tmp_path))
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    said = run(str(tmp_path), "-p", "one two", "-n", "8")
    whole = hf.LlamaForCausalLM.from_pretrained(tmp_path).float()
    alone = generate(whole, [0, 1], max_new_tokens=8).sequences[0].tolist()
    assert said.stdout == " ".join(WORDS[token] for token in alone) + "\n"
