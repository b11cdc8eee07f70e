"""The one exception that the command line turns into a single line and exit status 2."""


class KvlabError(Exception):
    """Bad input or an impossible request.

    The message is one line that says what is wrong and what to do about it.
    """
