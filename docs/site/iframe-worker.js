// The search of the site runs in a worker, which browsers refuse to a page that was opened as a file.
// There it runs in a frame with the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const { contentWindow: inner, contentDocument: page } = this.frame;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = () => {}; // languages other than English, which the site does not have
      const script = page.createElement("script");
      script.src = address;
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      page.body.append(script);
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
