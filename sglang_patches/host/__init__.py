"""SGLang, as the plugin touches it.

- `symbols`: the table of all that is touched, compared with what is installed;
- `versions`: what differs between versions of SGLang; `versions.host` is the one for the installed version;
- `hooks`: registers functions on SGLang's, and makes sure that none is left out.
"""
