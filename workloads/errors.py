"""The one exception that becomes one line on the user's terminal."""


class UserError(Exception):
    """Something a user can put right: a bad file, row, option or request.

    The message is one line and says what is wrong, where, and the remedy. Commands print it after
    ``kvtwin: `` and exit with code 2.
    """
