"""Fine-tune BERT so that every depth classifies, then let easy sentences leave early.

python examples/finetune_bert.py                                  # a tiny BERT, seconds, offline
python examples/finetune_bert.py google-bert/bert-base-uncased    # the real one
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers import PreTrainedTokenizerFast as Words

import everydepth as ed
from everydepth.data import Texts, tokenized

GOOD, BAD = ("lovely", "warm", "great", "funny"), ("dull", "cold", "poor", "boring")
THINGS = ("film", "story", "cast", "plot", "scene", "joke", "music", "ending", "actor", "script")
ALL = ("[PAD]", "the", "is", *GOOD, *BAD, *THINGS)


def sentences() -> Texts:
    """Put your own texts and labels here."""
    rows = [(f"the {thing} is {w}", w in GOOD) for thing in THINGS for w in GOOD + BAD]
    texts, labels = zip(*rows, strict=True)
    return Texts(texts, labels=torch.tensor(labels).long(), classes=("bad", "good"))


def tiny() -> tuple[BertForSequenceClassification, Any]:
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(ALL)}, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=len(ALL), num_hidden_layers=4, initializer_range=0.1, **sizes)
    return BertForSequenceClassification(config), Words(tokenizer_object=inner, pad_token="[PAD]")


def main(name: str = "") -> None:
    torch.manual_seed(0)
    model, tokenizer = tiny()
    if name:
        model = BertForSequenceClassification.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    train, test = tokenized(sentences(), tokenizer, 32).split((0.7, 0.3))
    net = ed.EveryDepth(model, objective=ed.aligned())
    ed.fit(net, train, epochs=10, batch_size=8, lr=3e-5 if name else 1e-3)
    for depth, share in enumerate(ed.trace(model, test, ["accuracy"])["accuracy"]):
        print(f"depth {depth}: {share:.1%}")
    found = ed.evaluate(model, test, ed.Confidence(threshold=0.95))
    print(f"leaving when 95 % sure: {found.mean_depth:.1f} blocks, {found.accuracy:.1%} right")
    net.save_pretrained("bert-every-depth")  # a plain BERT


if __name__ == "__main__":
    main(*sys.argv[1:])
