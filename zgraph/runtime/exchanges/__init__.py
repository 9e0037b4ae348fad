"""Exchanges between ranks: how they are started, which one each is, and a watch over those that do not end."""
