// The search of pages that are opened from a folder. Browsers start no Worker from file://, so this stand-in runs the
// worker's script in a hidden frame. Material's `offline` plugin would load such a script from another host, unless
// `extra.polyfills` names one with "iframe-worker" in it. There is no importScripts(): English pages do not need it.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${url}"></script>`;
      this.loaded = new Promise((done) => this.frame.addEventListener("load", done, { once: true }));
      document.body.append(this.frame);
    }

    async postMessage(data) {
      await this.loaded;
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker; // the script of the search looks for this name in the page around its frame
}
