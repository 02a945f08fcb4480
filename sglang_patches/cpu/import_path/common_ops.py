"""What SGLang's kernel package imports by this name when its compiled library does not load: here, no GPU driver.

This directory is put on `sys.path` by `sglang_patches.cpu.install`; spawned processes inherit `sys.path`, and so find
this module before any plugin has run in them.
"""

from sglang_patches.cpu import library

OPERATORS = library.register()
