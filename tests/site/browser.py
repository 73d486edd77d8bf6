"""Renders pages of the site in a browser without a window.

A process of its own. Its standard input is a JSON object: `pages` to render at
each of `widths`, and `queries` for the site's search. It prints another one:
what is wrong with each page, and the page that each query finds first.
"""

import json
import os
import pathlib
import sys

# Before Qt is loaded. The sandbox of Chromium refuses to run as root.
os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"

from PySide6 import QtCore, QtWebEngineCore, QtWebEngineWidgets, QtWidgets

# Milliseconds in which a page takes the width of its window.
LAYOUT_MS = 50
SEARCH_MS = 3000
READ_OVERFLOW = """
(() => {
  const page = document.documentElement;
  return page.scrollWidth - page.clientWidth;
})()"""
READ_FIRST_RESULT = """
document.querySelector("#search-results li a")?.getAttribute("href") ?? ''"""


class Requests(QtWebEngineCore.QWebEngineUrlRequestInterceptor):
  """Blocks what a page asks of the network, and remembers it."""

  def __init__(self):
    super().__init__()
    self.blocked = []

  def interceptRequest(self, info):
    url = info.requestUrl()
    if url.scheme() not in ("file", "data"):
      self.blocked.append(f"asks for {url.toString()}")
      info.block(True)


class Page(QtWebEngineCore.QWebEnginePage):
  """Remembers the errors of the console."""

  def __init__(self, profile):
    super().__init__(profile)
    self.errors = []

  def javaScriptConsoleMessage(self, level, message, line, source):
    if level == self.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
      self.errors.append(f"console: {message}")


class Browser:
  """One window, in which pages are loaded after each other."""

  def __init__(self):
    self.profile = QtWebEngineCore.QWebEngineProfile()
    self.requests = Requests()
    self.profile.setUrlRequestInterceptor(self.requests)
    self.page = Page(self.profile)
    # Else Qt refuses what a file asks of the network before `Requests` sees it.
    setting = QtWebEngineCore.QWebEngineSettings.WebAttribute
    self.page.settings().setAttribute(
      setting.LocalContentCanAccessRemoteUrls, True
    )
    self.view = QtWebEngineWidgets.QWebEngineView()
    self.view.setPage(self.page)
    self.view.show()

  def load(self, url):
    """Loads a page and returns whether there is one."""
    self.page.errors.clear()
    self.requests.blocked.clear()
    loop, found = QtCore.QEventLoop(), []

    def end(is_loaded):
      found.append(is_loaded)
      loop.quit()

    self.page.loadFinished.connect(end)
    self.page.load(url)
    loop.exec()
    self.page.loadFinished.disconnect(end)
    return found[0]

  def wait(self, ms):
    loop = QtCore.QEventLoop()
    QtCore.QTimer.singleShot(ms, loop.quit)
    loop.exec()

  def evaluate(self, script):
    loop, found = QtCore.QEventLoop(), []

    def end(value):
      found.append(value)
      loop.quit()

    self.page.runJavaScript(script, 0, end)
    loop.exec()
    return found[0]

  def find_problems(self, path, widths):
    """Returns what is wrong with a page, as texts."""
    self.view.resize(widths[0], 900)
    if not self.load(QtCore.QUrl.fromLocalFile(path)):
      return ["is not loaded"]
    problems = []
    for width in widths:
      self.view.resize(width, 900)
      self.wait(LAYOUT_MS)
      overflow = self.evaluate(READ_OVERFLOW)
      if overflow > 0:
        problems.append(f"is {overflow:g} pixels wider than {width}")
    return [*problems, *self.page.errors, *self.requests.blocked]

  def find_first(self, site, query):
    """Returns the address of the page that a query finds first."""
    url = QtCore.QUrl.fromLocalFile(str(site / "search.html"))
    url.setQuery(f"q={query}")
    self.load(url)
    self.wait(SEARCH_MS)
    return self.evaluate(READ_FIRST_RESULT)


def main():
  asked = json.load(sys.stdin)
  site = pathlib.Path(asked["site"])
  _application = QtWidgets.QApplication(sys.argv)  # Pages need it alive.
  browser = Browser()
  answer = {
    "problems": {
      page: browser.find_problems(str(site / page), asked["widths"])
      for page in asked["pages"]
    },
    "first": {
      query: browser.find_first(site, query) for query in asked["queries"]
    },
  }
  print(json.dumps(answer), flush=True)
  # Qt complains if Python ends the application before its pages.
  os._exit(0)


if __name__ == "__main__":
  main()
