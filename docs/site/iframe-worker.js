// A page that is opened as a file may start no worker, and the search runs in one. So a hidden frame runs it instead.
// The search asks for the name IFrameWorker to learn where it is.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => Promise.all(urls.map((script) => load(inside.document, script)))
      this.ready = load(inside.document, url)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

function load(page, url) {
  return new Promise((done, failed) => {
    const script = Object.assign(page.createElement("script"), { src: url, onload: done, onerror: failed })
    page.head.append(script)
  })
}
