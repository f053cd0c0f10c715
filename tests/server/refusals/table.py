"""The table: every row of every endpoint."""

from __future__ import annotations

from tests.server.refusals.bodies import list_all
from tests.server.refusals.chats import CHATS
from tests.server.refusals.forms import FORMS
from tests.server.refusals.refusal import CHAT, EMBED, RESPOND, TEXT, Refusal, Row, list_refusals
from tests.server.refusals.responses import RESPONSES
from tests.server.refusals.values import COUNTS, EMBEDDINGS, SAMPLING, TEXTS, TOKENS

_FEW_FORMS = list({row[1]: row for row in FORMS}.values())  # one of each kind, where another endpoint has them all
ROWS: dict[str, list[Row]] = {
    TEXT: [*SAMPLING, *COUNTS, *TEXTS, *FORMS],
    CHAT: [*SAMPLING, *COUNTS, *CHATS, *_FEW_FORMS],
    RESPOND: [*SAMPLING, *RESPONSES, *_FEW_FORMS],
    EMBED: EMBEDDINGS,
    **TOKENS,
}
REFUSALS = [*(row for path, rows in ROWS.items() for row in list_refusals(path, rows)), *list_all()]
# Of a server with keys, by what is sent instead of one.
KEYLESS = Refusal("/v1/models", None, None, "invalid_api_key", 401, "GET")
