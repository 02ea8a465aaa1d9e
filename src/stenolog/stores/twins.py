"""One error for several callers."""

from stenolog.errors import StenologError


def twin(error: StenologError) -> StenologError:
    """The same error for one more caller, because an object is not raised in two threads."""
    own = type(error).__new__(type(error))
    own.args = error.args
    own.__dict__.update(error.__dict__)
    own.__cause__ = error.__cause__
    return own
