"""The playground: look into a network at every depth, in a browser, on this machine.

`everydepth app` starts it. One file a tab says what is shown (`vision`, `language`, `surfaces`,
`compare`), `build` lays it out, `server` keeps it on this machine, `shelf` opens untrusted models,
`content` makes what is there by default. Needs the extra `app`.
"""

from everydepth.app.content import DEMO, prepare
from everydepth.app.serve import serve

__all__ = ["DEMO", "prepare", "serve"]
