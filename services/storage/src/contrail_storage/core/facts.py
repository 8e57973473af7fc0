"""Facts about stored messages that ``apply`` needs, and the port through which it asks for them.

A machine keeps nothing per message. When a limit or a delete takes messages away it must know their
subjects, sizes and times; these are in the blocks, the same on every replica, so asking keeps
``apply`` deterministic. The shell answers from memory for messages not yet written.
"""

from dataclasses import dataclass
from typing import Protocol

from contrail_common.blocks import Block
from contrail_common.texts import I64Array, U32Array


@dataclass(slots=True, eq=False)
class MessageFacts:
    """Subject ids, sizes in bytes and times of consecutive messages from ``base_seq`` on."""

    base_seq: int
    subject_ids: U32Array
    sizes: I64Array
    times_ns: I64Array

    @property
    def end_seq(self) -> int:
        """The sequence behind the last message."""
        return self.base_seq + len(self.sizes)


def facts_of(block: Block) -> MessageFacts:
    """The facts of a block's messages."""
    return MessageFacts(block.base_seq, block.subject_ids, block.sizes(), block.times_ns)


class FactsPort(Protocol):
    """Answers what the machine asks about messages that it appended in earlier entries."""

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of a run of messages that holds ``seq``; a bounded read."""
        ...
