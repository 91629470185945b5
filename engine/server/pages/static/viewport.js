// The part of the page that scrolls: it follows a growing answer only while its end is in view, and
// paints no more often than the browser keeps up with.

const NEAR = 48; // pixels from the end that still count as its end
const SHARE = 4; // at most a fourth of the time is spent painting

export class Viewport {
  constructor(scroller, button) {
    this._scroller = scroller;
    this._button = button;
    this._isAtEnd = true;
    this._timer = null;
    this._frame = null;
    this._draw = null;
    scroller.addEventListener("scroll", () => this._look(), { passive: true });
    button.onclick = () => this.toEnd();
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  toEnd() {
    this._scroller.scrollTop = this._scroller.scrollHeight;
    this._look();
  }

  /** Stay at the end if the reader was there. */
  follow() {
    if (this._isAtEnd) this.toEnd();
    else this._look();
  }

  /** Paint soon; of several calls until then, the last one acts. */
  paint(draw) {
    this._draw = draw;
    if (this._timer === null && this._frame === null) this._frame = requestAnimationFrame(() => this._paint());
  }

  _paint() {
    this._frame = null;
    const [draw, began] = [this._draw, performance.now()];
    this._draw = null;
    draw();
    this.follow();
    this._timer = setTimeout(() => {
      this._timer = null;
      if (this._draw) this.paint(this._draw);
    }, (SHARE - 1) * (performance.now() - began));
  }

  /** Forget what was to be painted. */
  cancel() {
    cancelAnimationFrame(this._frame);
    clearTimeout(this._timer);
    this._frame = this._timer = this._draw = null;
  }

  _look() {
    const { scrollHeight, scrollTop, clientHeight } = this._scroller;
    this._isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    this._button.hidden = this._isAtEnd;
  }
}
