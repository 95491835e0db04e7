"""A job, live: `board.py` asks all workers once a second, `page.py` shows that in a browser, `top.py` in a terminal."""
