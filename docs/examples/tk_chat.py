"""A chat window with tkinter: the model answers in this process, and the window stays responsive.

    python docs/examples/tk_chat.py [MODEL]

The asyncio loop runs in a thread; answers reach the window through a queue. `Stop` cancels after at most one pass.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import tkinter as tk

import edgespec
from edgespec import GenerateOptions, Generation


class Chat:
    """`window`: the Tk root. `finished` counts complete answers."""

    def __init__(self, window: tk.Tk, model_name: str) -> None:
        self.window, self.finished = window, 0
        self._model = edgespec.load(model_name)
        self._messages: list[dict[str, str]] = []
        self._running: Generation | None = None
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the answer is over
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.page = tk.Text(window, wrap="word", width=72, height=20)
        self.page.pack(fill="both", expand=True)
        self.entry = tk.Entry(window)
        self.entry.pack(fill="x")
        self.entry.bind("<Return>", lambda _: self.ask(self.entry.get()))
        tk.Button(window, text="Stop", command=self.stop).pack()
        window.protocol("WM_DELETE_WINDOW", self.close)
        self._show()

    def ask(self, question: str) -> None:
        """Send a question, unless an answer is being written."""
        if self._running is not None or not question.strip():
            return
        self.entry.delete(0, "end")
        self.page.insert("end", f"You: {question}\n")
        self._messages.append({"role": "user", "content": question})
        self._running = self._model.chat(self._messages, options=GenerateOptions(max_tokens=200))
        asyncio.run_coroutine_threadsafe(self._answer(self._running), self._loop)

    async def _answer(self, generation: Generation) -> None:
        async for event in generation:
            self._texts.put(event.text)
        self._texts.put(None)

    def stop(self) -> None:
        """End the answer; what was written stays."""
        if self._running is not None:
            self._running.cancel()

    def _show(self) -> None:
        """Show what has come; runs in the window's thread, 50 times a second."""
        while not self._texts.empty():
            text = self._texts.get()
            if text is not None:
                self.page.insert("end", text)
                self.page.see("end")
            elif self._running is not None:
                self._messages.append({"role": "assistant", "content": self._running.text})
                self.page.insert("end", f"\n({self._running.stats.tokens_per_second:.0f} tokens/s)\n")
                self._running, self.finished = None, self.finished + 1
        self.window.after(20, self._show)

    def close(self) -> None:
        """End everything in order: the answer, the loop, the model."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._model.close()
        self.window.destroy()


if __name__ == "__main__":
    root = tk.Tk()
    root.title("edgespec")
    Chat(root, sys.argv[1] if len(sys.argv) > 1 else "demo")
    root.mainloop()
