"""The HTTP bodies, in the form of OpenAI's completions API."""

import json
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

Stop = Annotated[str, StringConstraints(min_length=1, max_length=100)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """What a client may ask. ``ignore_eos`` is vLLM's: go on to ``max_tokens`` whatever comes.

    Some clients always send the fields from ``n`` to ``logprobs``; they are taken where they ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str | list[Annotated[int, Field(ge=0)]]
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    top_p: float = Field(default=1.0, ge=1, le=1)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    echo: Literal[False] = False
    logprobs: None = None
    user: str | None = None
    ignore_eos: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_of_a_list(cls, prompt: Any) -> Any:
        """OpenAI takes lists of prompts; a list of one is that prompt, and more are refused as no text."""
        is_list_of_one = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list)
        return prompt[0] if is_list_of_one else prompt

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return not self.stream or bool(self.stream_options and self.stream_options.include_usage)


@dataclass
class ApiError(Exception):
    """A refusal as a client sees it: a status, and ``{"error": {message, type, param, code}}``."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    outcome: str = "invalid"  # how the request is counted
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def parse_completion(body: bytes) -> CompletionRequest:
    """Read a request body; raises ApiError 400, which names the field and repeats nothing of the prompt."""
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = str(first["loc"][0]) if first["loc"] else None
        message = f"{where}: {first['msg']}" if where else "the body is no JSON object: " + first["msg"]
        raise ApiError(400, message, param=where, code=first["type"]) from None


@dataclass(frozen=True)
class Answer:
    """Builds the bodies of one completion."""

    request_id: int
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def body(self, text: str, finish_reason: str | None, usage: dict[str, int] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._around([choice], usage)

    def usage_only(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._around([], usage)

    def _around(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            **({"usage": usage} if usage else {}),
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
