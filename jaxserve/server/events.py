"""The events of an answer. Parsers of text and the reader of outputs yield them, every protocol writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.request import CompletionOutput, RequestOutput


@dataclass(slots=True)  # nearly every token of every stream has one, as `Update`
class TextDelta:
    """Text of the answer itself. It is read only."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function; its arguments follow."""

    index: int  # the call's position in the choice, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next part of a call's arguments. Together the parts are the JSON text of one object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call has no more arguments. Every call ends before anything else of its choice comes."""

    index: int
    is_complete: bool = True  # False: the answer ended inside its arguments


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The last event of a choice."""

    reason: str  # stop, length or another of `FinishReason`; calls: it stopped behind a complete one
    stop_reason: int | str | None  # the stop token id or stop string that matched; None for EOS


ParserEvent = TextDelta | ReasoningDelta | CallBegun | ArgumentsDelta
Event = ParserEvent | CallEnded | AnswerEnded


@dataclass(slots=True)  # every token of every stream has one, and a frozen one takes twice as long to make
class Update:
    """The addition of one output of the engine to one choice. It is read only."""

    choice: int  # its index in the answer, across all prompts of the request
    begins: bool  # it is the first of its choice
    events: Sequence[Event]  # may be empty: tokens without text of their own yet
    completion: CompletionOutput  # has the tokens of the events, and their log-probabilities
    output: RequestOutput  # has the prompt
    num_reasoning: int = 0  # of its tokens, those inside reasoning

    @property
    def ended(self) -> AnswerEnded | None:
        """The end of the choice, if it is among the events."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, AnswerEnded) else None


def join_texts(events: Sequence[Event], kind: type[TextDelta | ReasoningDelta] = TextDelta) -> str:
    """Returns the text of all events of one kind."""
    return "".join([event.text for event in events if isinstance(event, kind)])
