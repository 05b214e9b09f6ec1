"""A page on a run: `history.py` remembers, `page.py` draws, `server.py` shows it on loopback while the run goes on."""
