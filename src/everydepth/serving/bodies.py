"""The JSON bodies that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

MOST = 256
"""The most rows in one request: what one client may put before those of others at once."""


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no text; send whole characters") from error
    return value


Text = Annotated[str, AfterValidator(_text)]
Tokens = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Depth = Annotated[int, Field(strict=True, gt=-(2**31), lt=2**31)]


def _few(rows: Any) -> Any:
    if isinstance(rows, list) and len(rows) > MOST:
        raise ValueError(f"{len(rows)} rows, but a request may have {MOST}; send several requests")
    return rows


def _form(value: Any) -> str:
    """The form that a value is meant to have, so that errors speak of this one."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "lists"
    return "texts" if isinstance(first, str) else "tokens"


def _listed(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


Texts = Annotated[list[Text], BeforeValidator(_few)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[list[Tokens], BeforeValidator(_few), Tag("lists")],
    Discriminator(_form),
]


class Body(BaseModel):
    """Refuses unknown fields, except those of `neutral`, at the values that change no answer.

    An empty tuple stands for any value. A field that is null is as good as missing.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - cls.model_fields:
            harmless = cls.neutral.get(name, (None,))
            if harmless and given[name] not in harmless:
                # Half of a surrogate pair cannot be sent back as it is.
                shown = ascii(name)[1:-1]
                raise ValueError(f"{shown} is not supported here; leave it out")
        return given


class StreamOptions(Body):
    neutral = {"include_obfuscation": ()}
    include_usage: bool = False


class Wanted(Body):
    """The fields that completions and chats share."""

    neutral = {
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "logprobs": (0, False),
        "metadata": (),
        "min_p": (0,),
        "parallel_tool_calls": (),
        "presence_penalty": (0,),
        "prompt_cache_key": (),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": (),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "user": (),
    }
    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    depth: Depth | None = None
    draft_depth: Depth | None = None
    policy: str | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _streamed(self) -> Wanted:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream; leave them out, or stream the answer")
        return self


class Completion(Wanted):
    prompt: Prompt


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    neutral = {"annotations": ()}
    role: Text
    content: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[TextPart], Tag("list")],
        Discriminator(_listed),
    ]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Chat(Wanted):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None


class Classify(Body):
    """`input` holds texts, or images in base64 (with or without `data:image/...;base64,`)."""

    neutral = {"user": (), "metadata": ()}
    model: str
    input: Annotated[
        Annotated[Text, Tag("text")] | Annotated[Texts, Field(min_length=1), Tag("list")],
        Discriminator(_listed),
    ]
    depth: Depth | None = None
    policy: str | None = None
