"""Reader of programs that keep all conversations in one SQLite database.

This is a separate module, because `sqlite3` is slow to import and the hook of Claude Code does not
need it.
"""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection

from stenolog.transfer.transcripts.sqlite_file import connect
from stenolog.transfer.transcripts.transcript import Transcript, TranscriptFile, TranscriptReader


class DatabaseReader(TranscriptReader):
    """Reader of a SQLite database that holds all conversations of a program."""

    file_name: str
    may_copy = True
    """Whether the file may be copied for reading. False for a file that holds credentials."""

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of a database. `path` is the file or its folder.

        Raises NotASession.
        """
        path = path / self.file_name if path.is_dir() else path
        if not path.is_file():
            return
        with connect(path, may_copy=self.may_copy) as connection:
            ids = self.list_ids(connection)
        for id_ in ids:
            yield self.file_at(str(id_), path, conversation_id=id_)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Add the messages of a conversation. Raises NotASession, OSError."""
        path = file.paths[0]
        with connect(path, may_copy=self.may_copy) as connection:
            self.convert(connection, file.conversation_id, transcript)

    @abstractmethod
    def list_ids(self, connection: Connection) -> list[str]:
        """Return the ids of the conversations."""

    @abstractmethod
    def convert(self, connection: Connection, conversation_id: str, transcript: Transcript) -> None:
        """Add the conversation with this id to an empty transcript."""
