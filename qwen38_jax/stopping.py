"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string that it completes.

    The first to be complete decides, not the first to begin: with stops "abcd" and "bc" the text "abcd" is
    cut before "bc", because generation ends there whatever would have followed. Of stops that are complete
    at the same character the longest is cut. How the text is divided into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]):
        """Raises ValueError unless `stops` is a sequence of non-empty strings."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop strings must be a list of non-empty strings, not {stops!r}")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns what may now be shown, and whether a stop string is complete. What could be the beginning of a
        stop string is held back. After a stop nothing more is shown.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start = min(matches)
            self._held, self._stopped = "", True
            return text[:start], True
        shown = len(text) - self._possible_beginning(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What is still held back, for a text that ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
