"""How long an owner keeps a value: the protocol, and the two ledgers that decide by it. Pure; nothing is sent here."""
