"""A clock that tests advance."""


class FakeClock:
    """Returns `now`, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
