"""The text of a token as it stands inside a text, whatever kind of tokenizer it belongs to.

1. A special or added token is its literal text, and a byte-fallback piece (``<0x0A>``) its byte: the replacement
   character where that is only part of a character.
2. Any other token is decoded behind an anchor, a token that ends in a letter or digit, and its text is what that adds:
   decoders take the space off the start of a text, so alone "▁so" and "so" would read alike.
3. An id outside the vocabulary is ``<id>``; no text is empty.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from tokenizers import Tokenizer, pre_tokenizers

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


class Vocabulary:
    """Texts of a tokenizer's tokens, and which texts are tokens; without a tokenizer every token is ``<id>``.

    Example: ``vocabulary.text(279) == " the"`` and ``" the" in vocabulary``.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        # The first token that ends in a whole character, which no neighbour can melt into; none in an odd vocabulary.
        size = tokenizer.get_vocab_size(with_added_tokens=True) if tokenizer else 0
        pieces = ((token_id, (tokenizer.id_to_token(token_id) or "")[-1:]) for token_id in range(size) if tokenizer)
        self._anchor = list(islice((token_id for token_id, end in pieces if end.isascii() and end.isalnum()), 1))

    def text(self, token_id: int) -> str:
        """The text of one token inside a text."""
        piece = self._tokenizer.id_to_token(token_id) if self._tokenizer and token_id >= 0 else None
        if not self._tokenizer or not piece:
            return f"<{token_id}>"
        if token_id in self._added:
            content = self._added[token_id].content
            # Runs of spaces are added with sentencepiece's mark, which is part of other names.
            return content if content.strip(SPACE_MARK) else content.replace(SPACE_MARK, " ")
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(byte.group(1)).decode("utf-8", errors="replace")
        return self._decoded(self._tokenizer, token_id) or piece.replace(SPACE_MARK, " ")

    def read(self, sequences: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of tokens, without tokens that only control the model."""
        known = [[int(token_id) for token_id in ids if token_id >= 0] for ids in sequences]
        if not self._tokenizer:
            return ["".join(map(self.text, ids)) for ids in known]
        return self._tokenizer.decode_batch(known, skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Whether the token controls the model and is no text at all, such as an end of sequence."""
        return token_id in self._added and self._added[token_id].special

    def ids(self, text: str) -> list[int]:
        """The tokens that have exactly this text, ascending: none, one, or rarely two, a piece and a byte."""
        spelled = {self._tokenizer.token_to_id(piece) for piece in _spellings(text)} if self._tokenizer else set()
        return sorted(token_id for token_id in spelled if token_id is not None and self.text(token_id) == text)

    def __contains__(self, text: object) -> bool:
        """Whether some token has exactly this text."""
        return isinstance(text, str) and bool(self.ids(text))

    def _decoded(self, tokenizer: Tokenizer, token_id: int) -> str:
        if tokenizer.decoder is None:  # decode would put a space between any two tokens
            return ""
        before, after = (
            tokenizer.decode(ids, skip_special_tokens=False) for ids in (self._anchor, [*self._anchor, token_id])
        )
        return after.removeprefix(before)


def _spellings(text: str) -> set[str]:
    """How the pieces of the known kinds of vocabulary may spell a text: as it is, sentencepiece, byte-level, a byte."""
    byte_level = "".join(piece for piece, _ in _BYTE_LEVEL.pre_tokenize_str(text))
    spellings = {text, text.replace(" ", SPACE_MARK), byte_level}
    return spellings | {f"<0x{ord(text):02X}>"} if len(text) == 1 and text.isascii() else spellings
