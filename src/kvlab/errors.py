"""The one exception the command line turns into a line of text and exit code 2."""


class KvlabError(Exception):
    """Bad input or an impossible request: the message is one line that says what is wrong and what to do."""
