"""The database of the studies, with one sentence on why it cannot be opened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from apo_experiments.errors import UserError
from apo_experiments.files import explained

optuna.logging.set_verbosity(optuna.logging.WARNING)  # a sweep has its own display

#: How long a process waits for another one that writes to the same SQLite file.
_SQLITE_SECONDS = 60.0
_ATTEMPTS = 10
#: What workers that start at the same time on an empty database make each other see.
_RACES = ("already exists", "duplicate key", "unique constraint", "database is locked")


def address(storage: str | None, root: Path) -> str:
    """Return the URL of the database: what the user gave, or a file among the runs.

    Example:
        >>> address(None, Path("/somewhere/runs"))
        'sqlite:////somewhere/runs/sweeps/studies.db'
        >>> address("postgresql://me@host/apo", Path("runs"))
        'postgresql+psycopg://me@host/apo'
    """
    if storage is None:
        return f"sqlite:///{root.absolute() / 'sweeps' / 'studies.db'}"
    scheme, separator, rest = storage.partition("://")
    if not separator:
        raise UserError(
            f"--storage was {storage!r}: it must be a URL such as postgresql://user@host/name or sqlite:///file.db."
        )
    # The driver that comes with the experiments; SQLAlchemy's default depends on its version.
    return f"postgresql+psycopg://{rest}" if scheme in ("postgresql", "postgres") else storage


def exists(url: str) -> bool:
    """Return whether there is a database; only for SQLite files it can be False, as opening would create them."""
    return (file := _sqlite_file(url)) is None or file.exists()


def open_database(url: str) -> RDBStorage:
    """Connect to a database, and create its tables if necessary.

    Args:
        url: As from :func:`address`.
    """
    if (file := _sqlite_file(url)) is not None:
        with explained(file, "--storage or --runs"):
            file.parent.mkdir(parents=True, exist_ok=True)
    options = {"connect_args": {"timeout": _SQLITE_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except ImportError:
            package = "psycopg[binary]" if url.startswith("postgresql") else "its driver for SQLAlchemy"
            raise UserError(
                f"the storage {shown(url)} needs a driver that is not installed: pip install {package}."
            ) from None
        except ArgumentError as error:
            raise UserError(
                f"the storage {shown(url)} is not a valid URL ({error}): write it as postgresql://user@host/name."
            ) from error
        except (SQLAlchemyError, RuntimeError) as error:
            if attempt == _ATTEMPTS or not any(words in str(error).lower() for words in _RACES):
                raise UserError(
                    f"the storage {shown(url)} cannot be opened ({_reason(error)}): check the address, and that it "
                    "may be written."
                ) from error
            time.sleep(0.1 * attempt)
    raise AssertionError("not reached")


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Turn an error of the database during a sweep into one sentence.

    Example:
        >>> from sqlalchemy.exc import OperationalError
        >>> with reachable("postgresql://me:secret@host/apo"):
        ...     raise OperationalError("", {}, Exception("the connection was lost"))
        Traceback (most recent call last):
        ...
        apo_experiments.errors.UserError: the storage postgresql://me:***@host/apo has failed (the connection was
        lost): when it is back, run the same command to resume.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        raise UserError(
            f"the storage {shown(url)} has failed ({_reason(error)}): when it is back, run the same command to resume."
        ) from error


def shown(url: str) -> str:
    """Return a URL without its password."""
    return make_url(url).render_as_string(hide_password=True)


def _sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database; None for one in memory, and for other databases."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UserError(f"--storage was {url!r} ({error}): write it as postgresql://user@host/name.") from None
    in_file = parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:"
    return Path(str(parsed.database)) if in_file else None


def _reason(error: BaseException) -> str:
    """Return the first line of the database's own message."""
    while error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None) or error
    return (str(original).strip().splitlines() or [type(original).__name__])[0]
