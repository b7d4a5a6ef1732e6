"""The playground: explore a network at every depth in a browser, on this machine.

`everydepth app` starts it. There is a module per tab (`vision`, `language`, `surfaces`, `compare`,
...); `build` lays out the page, `server` restricts it to this machine, `shelf` opens untrusted
models, and `content` trains the default ones. Needs the extra `app`.
"""

from everydepth.app.content import DEMO, prepare
from everydepth.app.serve import serve

__all__ = ["DEMO", "prepare", "serve"]
