"""Reservation of a request in its tenant's account, until the end of its stream settles it."""

from __future__ import annotations

from collections.abc import Callable


class Reservation:
    """The right to give a reservation back: the request then counts as never sent. It has one owner at a time."""

    def __init__(self, give_back: Callable[[], object] | None) -> None:
        """``give_back`` None: there is nothing to give back."""
        self._give_back = give_back

    def give_back(self) -> None:
        """Give the reservation back, once. The owner of the right alone can."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def handed_over(self) -> Reservation:
        """Return the right for another owner; this object loses it."""
        other, self._give_back = Reservation(self._give_back), None
        return other
