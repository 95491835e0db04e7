"""What stands in place of a function that a call has only the number of: its definition, or what has changed for it.

The first byte says which, and is none of a payload's own forms (`codec.py`): a plain definition is a payload as it is.

    NAMED                the name that the other worker has exported it under; nothing is unpickled
    OF_A_SCRIPT          a function of the caller's script, with all the globals that it uses
    OF_A_SCRIPT_IN_PART  the same without what came before
    NEWS                 globals of the script that are to change before the call; the function was defined before
    ANEW                 a function that was defined before, under the same number, with all the globals that it uses
"""

NAMED = b"\x08"
OF_A_SCRIPT = b"\x09"
NEWS = b"\x0a"
OF_A_SCRIPT_IN_PART = b"\x0b"
ANEW = b"\x0c"
