"""The database of the studies, with one sentence on why it cannot be opened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from apo_experiments.errors import UserError
from apo_experiments.files import explained

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

__all__ = ["address", "has_study", "import_optuna", "open_database", "reachable"]

#: How long a process waits for another one that writes to the same SQLite file.
_SQLITE_SECONDS = 60.0
_ATTEMPTS = 10


def import_optuna() -> ModuleType:
    """Return the package optuna, quiet.

    Raises:
        UserError: It is not installed.

    Example:
        >>> import_optuna().__name__
        'optuna'
    """
    try:
        import optuna
    except ImportError:
        raise UserError(
            "Sweeps need the package optuna, which is not installed: pip install 'apo-optim[experiments]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep has its own display
    return optuna


def address(storage: str | None, root: Path) -> str:
    """Return the URL of the database.

    Args:
        storage: What the user gave: a URL, or None for a file among the runs.
        root: The folder of all runs.

    Raises:
        UserError: It is no URL.

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
            f"the storage was {storage!r}: it must be a URL such as postgresql://user@host/name or sqlite:///file.db."
        )
    # The driver that comes with the experiments; SQLAlchemy's default depends on its version.
    return f"postgresql+psycopg://{rest}" if scheme in ("postgresql", "postgres") else storage


def open_database(url: str) -> RDBStorage:
    """Connect to a database, and create its tables if necessary.

    Args:
        url: As from :func:`address`.

    Raises:
        UserError: It cannot be opened, or a package is missing.

    Example:
        >>> open_database("sqlite://").get_all_studies()
        []
    """
    optuna = import_optuna()
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    _make_folder(url)
    options = _engine_options(url)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except ImportError:
            package = "psycopg[binary]" if url.startswith("postgresql") else "its driver for SQLAlchemy"
            raise UserError(
                f"the storage {_shown(url)} needs a driver that is not installed: pip install {package}."
            ) from None
        except ArgumentError as error:
            raise UserError(
                f"the storage {_shown(url)} is not a valid URL ({error}): write it as postgresql://user@host/name."
            ) from error
        except (SQLAlchemyError, RuntimeError) as error:
            # Workers that start at the same time on an empty database conflict here.
            if attempt == _ATTEMPTS or not _is_a_race(error):
                raise UserError(
                    f"the storage {_shown(url)} cannot be opened ({_reason(error)}): check the address, and that it "
                    "may be written."
                ) from error
            time.sleep(0.1 * attempt)
    raise AssertionError("not reached")


def has_study(url: str, name: str) -> bool:
    """Return whether a database has a study of this name. Unlike :func:`open_database` it creates nothing.

    Args:
        url: As from :func:`address`.
        name: Name of the study.

    Raises:
        UserError: The database cannot be reached.

    Example:
        >>> has_study("sqlite:////no/such/folder/studies.db", "rosenbrock")
        False
    """
    from sqlalchemy import create_engine, inspect, text

    file = _sqlite_file(url)
    if file is not None and not file.exists():
        return False
    with reachable(url):
        engine = create_engine(url, **_engine_options(url))
        try:
            with engine.connect() as connection:
                if not inspect(connection).has_table("studies"):
                    return False
                found = connection.execute(text("SELECT 1 FROM studies WHERE study_name = :name"), {"name": name})
                return found.first() is not None
        finally:
            engine.dispose()


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Turn an error of the database during a sweep into one sentence.

    Raises:
        UserError: It failed.

    Example:
        >>> from sqlalchemy.exc import OperationalError
        >>> with reachable("postgresql://me:secret@host/apo"):
        ...     raise OperationalError("", {}, Exception("the connection was lost"))
        Traceback (most recent call last):
        ...
        apo_experiments.errors.UserError: the storage postgresql://me:***@host/apo has failed (the connection was
        lost): when it is back, run the same command to resume.
    """
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        raise UserError(
            f"the storage {_shown(url)} has failed ({_reason(error)}): when it is back, run the same command to resume."
        ) from error


def _engine_options(url: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": _SQLITE_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}


def _make_folder(url: str) -> None:
    path = _sqlite_file(url)
    if path is not None:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)


def _sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database; None for one in memory, and for other databases."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UserError(f"the storage was {url!r} ({error}): write it as postgresql://user@host/name.") from None
    if parsed.get_backend_name() == "sqlite" and parsed.database and parsed.database != ":memory:":
        return Path(parsed.database)
    return None


def _is_a_race(error: Exception) -> bool:
    text = str(error).lower()
    return any(
        words in text for words in ("already exists", "duplicate key", "unique constraint", "database is locked")
    )


def _reason(error: BaseException) -> str:
    """Return the first line of the database's own message."""
    while error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None) or error
    return (str(original).strip().splitlines() or [type(original).__name__])[0]


def _shown(url: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)
