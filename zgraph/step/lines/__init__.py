"""The user's lines while a step is traced: their calls are watched, redirected to stand-ins, or refused."""
