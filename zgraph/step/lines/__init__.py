"""The user's lines while a step is traced: what they call is watched, redirected to what stands in, or refused."""
