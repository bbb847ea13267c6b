// Images for the model: small enough for a request, and without what a camera writes beside the picture.

const TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const LONGEST_SIDE = 1568;
const LARGEST = 1_000_000;
/** How many images one message may have. */
export const MOST_IMAGES = 8;

export const isImage = (file: File): boolean => TYPES.includes(file.type);
export const isShown = (url: string | undefined): url is string => /^data:image\/(png|jpeg|gif|webp);base64,/.test(url ?? "");

/** The image as a data URL. Throws if the browser cannot read it. */
export async function prepared(file: File): Promise<string> {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  canvas.getContext("2d")!.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  const exact = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  return exact && exact.length <= LARGEST ? exact : canvas.toDataURL("image/jpeg", 0.88);
}
